"""minfer runs GGUF language models on CPUs and GPUs through one declarative compute graph.

`load` opens a model; `Model.generate` and `Model.chat` stream text; `Session` keeps a conversation.
Every error on purpose is a `MinferError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from minfer.errors import (
    ContextOverflowError,
    DeviceMemoryError,
    GraphError,
    MinferError,
    ModelFileError,
    NumericsError,
    RequestError,
    SourceError,
    TemplateError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from minfer.engine.generate import Generation, Timings, Usage
    from minfer.engine.model import Model, Session, load
    from minfer.engine.sampler import Sampling

__version__ = "0.1.0"

__all__ = [
    "ContextOverflowError",
    "DeviceMemoryError",
    "Generation",
    "GraphError",
    "MinferError",
    "Model",
    "ModelFileError",
    "NumericsError",
    "RequestError",
    "Sampling",
    "Session",
    "SourceError",
    "TemplateError",
    "Timings",
    "UnsupportedError",
    "Usage",
    "load",
]

_LAZY = {
    "Generation": "generate",
    "Model": "model",
    "Sampling": "sampler",
    "Session": "model",
    "Timings": "generate",
    "Usage": "generate",
    "load": "model",
}


def __getattr__(name: str) -> object:
    # numpy and the engine load on first use, so that `minfer --help` and `import minfer` stay quick.
    if name in _LAZY:
        return getattr(import_module(f"minfer.engine.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
