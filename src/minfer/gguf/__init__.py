"""GGUF model files: `open_model` reads one (all its parts), `write_model` writes one."""

from __future__ import annotations

from minfer.gguf.header import TensorInfo
from minfer.gguf.reader import ModelFile, open_model
from minfer.gguf.values import MetaValue, StringArray, ValueType
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
