"""GGUF model files: `open_model` reads one (all its parts), `write_model` writes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.gguf.header import TensorInfo
from minfer.gguf.reader import ModelFile, open_model
from minfer.gguf.values import MetaValue, StringArray, ValueType

if TYPE_CHECKING:
    from minfer.gguf.writer import Tensor, typed, write_model

__all__ = [
    "MetaValue",
    "ModelFile",
    "StringArray",
    "Tensor",
    "TensorInfo",
    "ValueType",
    "open_model",
    "typed",
    "write_model",
]


def __getattr__(name: str) -> object:
    # Running a model writes none.
    if name in ("Tensor", "typed", "write_model"):
        from minfer.gguf import writer

        return getattr(writer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
