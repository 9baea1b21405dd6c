"""Architectures, one file each, named as GGUF names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.errors import ModelFileError, UnsupportedError
from minfer.models.gemma3 import Gemma3
from minfer.models.llama import Llama
from minfer.models.qwen2 import Qwen2
from minfer.models.qwen3 import Qwen3
from minfer.models.reader import Reader
from minfer.models.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minfer.gguf import ModelFile

__all__ = ["ARCHITECTURES", "Transformer", "load_architecture"]

ARCHITECTURES: Mapping[str, type[Transformer]] = {a.arch: a for a in (Llama, Qwen2, Qwen3, Gemma3)}


def load_architecture(file: ModelFile) -> Transformer:
    """The architecture a file names, its hyper-parameters and tensors checked.

    Raises `UnsupportedError` for an architecture that minfer does not have, `ModelFileError` for a file that
    contradicts the one it names.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"{file.path}: general.architecture is {arch!r}; a model names its architecture there")
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: architecture {arch!r} is not supported; minfer has {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[arch](Reader(file, arch))
