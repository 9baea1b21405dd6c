"""GGUF model files: `open_model` reads one (all its parts), `write_model` writes one."""

from __future__ import annotations

from minfer.gguf.header import TensorInfo
from minfer.gguf.reader import ModelFile, open_model
from minfer.gguf.values import MetaValue, StringArray, ValueType

__all__ = ["MetaValue", "ModelFile", "StringArray", "TensorInfo", "ValueType", "open_model"]
