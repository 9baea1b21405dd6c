"""Models split into parts.

A part is named `<prefix>-00001-of-00003.gguf`, counted from 1, and carries `split.no`, counted from 0, `split.count`
and `split.tensors.count`, the tensors of all parts together. The first part carries the model's metadata.
Source: llama.cpp's gguf-split tool.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from minfer.errors import ModelFileError
from minfer.gguf.header import clip

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minfer.gguf.header import Header
    from minfer.gguf.values import MetaValue

NO, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_OF_ONE_PART = (NO, "general.alignment")  # keys that may differ from part to part
_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 99_999  # five digits


def part_name(prefix: str, index: int, count: int) -> str:
    """The file name of part `index`, counted from 0."""
    return f"{prefix}-{index + 1:05d}-of-{count:05d}.gguf"


def _integer(header: Header, key: str, path: Path, low: int, high: int) -> int:
    value = header.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        found = "nothing" if value is None else clip(str(value))
        raise ModelFileError(f"{path}: metadata key {key!r}: found {found}, expected an integer from {low} to {high}")
    return value


def split_count(header: Header, path: Path) -> int:
    """Parts of the model that this file belongs to; 1 where it is whole."""
    if COUNT not in header.metadata:
        return 1
    return max(1, _integer(header, COUNT, path, 0, MAX_PARTS))


def part_paths(header: Header, path: Path) -> list[Path]:
    """Paths of all parts in order, from the name of any one; raises where a part is missing or the name disagrees."""
    count = split_count(header, path)
    index = _integer(header, NO, path, 0, count - 1)
    name = _NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count or int(name["number"]) != index + 1:
        prefix = name["prefix"] if name else path.stem
        raise ModelFileError(
            f"{path}: the file says that it is part {index + 1} of {count} ({NO} = {index}, counted from 0); "
            f"expected it to be named {part_name(prefix, index, count)!r}, beside the other parts"
        )
    paths = []
    for i in range(count):
        part = path.with_name(part_name(name["prefix"], i, count))
        if not part.exists():
            raise ModelFileError(f"{part}: part {i + 1} of {count} is missing; put all parts in one folder")
        paths.append(part)
    return paths


def _same(a: MetaValue, b: MetaValue) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def check_parts(headers: Sequence[Header], paths: Sequence[Path]) -> None:
    """Refuse parts that do not make one model.

    A part of another model is told by its counts, by a metadata value that differs from the first part's, or by its
    tensors' names. A part with the same counts and names cannot be told: the format has no fingerprint.
    """
    first, count = headers[0], len(headers)
    owner: dict[str, Path] = {}
    for index, (header, path) in enumerate(zip(headers, paths, strict=True)):
        for key, expected in ((NO, index), (COUNT, count)):
            found = _integer(header, key, path, 0, MAX_PARTS)
            if found != expected:
                raise ModelFileError(
                    f"{path}: metadata key {key!r}: found {found}, expected {expected}; not a part of this model"
                )
        for key, value in header.metadata.items():
            if key not in _OF_ONE_PART and key in first.metadata and not _same(value, first.metadata[key]):
                raise ModelFileError(
                    f"{path}: metadata key {clip(key)} differs from that of {paths[0].name}; a part of another model"
                )
        for name in header.tensors:
            if name in owner:
                raise ModelFileError(f"{path}: tensor {clip(name)} is also in {owner[name].name}; expected it once")
            owner[name] = path
    if TENSORS in first.metadata:
        expected = _integer(first, TENSORS, paths[0], 0, 1 << 63)
        if len(owner) != expected:
            raise ModelFileError(
                f"{paths[0]}: metadata key {TENSORS!r}: the {count} parts hold {len(owner)} tensors, "
                f"expected {expected}; a part is of another model"
            )
