"""Metadata values: the GGUF value types, and what each becomes in Python.

integers, floats, bool    int, float, bool
string                    str, or bytes where it is not UTF-8
array of numbers, bools   read-only 1-D numpy array of that type
array of strings          StringArray: an immutable sequence of bytes (tokens need not be UTF-8)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray


class ValueType(IntEnum):
    """The type number before a metadata value; source: `gguf_type` in ggml's gguf.h and the GGUF specification."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


class StringArray(Sequence[bytes]):
    """An immutable sequence of byte strings over one block of bytes.

    Items are cut out when asked for, so a vocabulary of 262,144 tokens costs two arrays and not as many objects.
    Equal to any StringArray, list or tuple with equal items.
    """

    __slots__ = ("_data", "_spans")

    def __init__(self, data: bytes, spans: NDArray[np.int64]) -> None:
        """`spans` is int64 [n, 2]: where each item starts and ends in `data`."""
        self._data = data
        self._spans = spans

    @classmethod
    def of(cls, items: Sequence[bytes]) -> StringArray:
        """A StringArray of these items."""
        ends = np.cumsum([0, *map(len, items)], dtype=np.int64)
        return cls(b"".join(items), np.stack([ends[:-1], ends[1:]], axis=-1))

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> StringArray: ...
    def __getitem__(self, index: int | slice) -> bytes | StringArray:
        if isinstance(index, slice):
            return StringArray(self._data, self._spans[index])
        start, end = self._spans[index].tolist()
        return self._data[start:end]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items())

    def join(self, separator: bytes) -> bytes:
        """The items with `separator` between them, in one piece."""
        return separator.join(self._items())

    def _items(self) -> list[bytes]:
        data = self._data
        return [data[start:end] for start, end in zip(*self._spans.T.tolist(), strict=True)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringArray | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(repr(item) for item in self[:3])
        return f"StringArray({len(self)}: {head}{', ...' if len(self) > 3 else ''})"


MetaValue: TypeAlias = bool | int | float | str | bytes | NDArray[Any] | StringArray
