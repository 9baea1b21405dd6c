"""Write a GGUF file, or a split one.

Metadata values carry their type: a numpy scalar or array is written as its dtype, str and bytes as a string. Plain
Python takes the usual type: bool, int as UINT32 (INT32 where negative; the 64-bit type where that is too small), float
as FLOAT32, and a list or tuple as an array of BOOL, INT32 (INT64 where that is too small), FLOAT32 or STRING.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

from minfer.errors import RequestError
from minfer.gguf.header import DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_DIMS, MAX_KEY_BYTES, clip
from minfer.gguf.split import COUNT, MAX_PARTS, NO, TENSORS, part_name
from minfer.gguf.values import DTYPES, MetaValue, StringArray, ValueType
from minfer.quants import FORMATS, Format

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minfer.quants.format import F32, U8

_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SPLIT_KEYS = (NO, COUNT, TENSORS)

WriteValue: TypeAlias = (
    MetaValue | np.generic | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str | bytes]
)


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: `shape` feature-fastest, `data` its bytes (any uint8 shape), or a function that makes them.

    A function is called once, when its turn comes, so that a model larger than memory can be written.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: U8 | Callable[[], U8]

    @classmethod
    def of(cls, name: str, values: F32, fmt: Format = FORMATS["F32"]) -> Tensor:
        """Quantize float32 values, whose numpy shape is the file's reversed: (n_out, n_in) for a matmul weight."""
        data = fmt.quantize(values if values.ndim else values[None])
        return cls(name, fmt, values.shape[::-1], data)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[1:]) * self.format.row_bytes(self.shape[0] if self.shape else 1)


def typed(value: MetaValue, kind: ValueType) -> MetaValue | np.generic:
    """A value as read, with the type as read: what `write_model` needs to write it back unchanged."""
    if kind is ValueType.STRING or not isinstance(value, bool | int | float):
        return value
    scalar: np.generic = DTYPES[kind].type(value)
    return scalar


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8") if isinstance(text, str) else bytes(text)
    return _U64.pack(len(raw)) + raw


def _numbers(key: str, values: NDArray[Any]) -> tuple[ValueType, bytes]:
    """Element type and little-endian bytes."""
    dtype = values.dtype.newbyteorder("<")
    if dtype not in _TYPES or values.ndim > 1:
        raise RequestError(f"metadata {key!r}: cannot write {values.dtype} of shape {values.shape}")
    return _TYPES[dtype], values.astype(dtype).tobytes()


def _singles(key: str, values: Sequence[float]) -> F32:
    """float32, refusing a finite value that would become Inf."""
    double = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        single = double.astype(np.float32)
    lost = np.isinf(single) & np.isfinite(double)
    if lost.any():
        raise RequestError(f"metadata {key!r}: {double[lost][0]} does not fit FLOAT32; give it as numpy float64")
    return single


def _array(key: str, values: Sequence[Any]) -> NDArray[Any] | Sequence[str | bytes]:
    """A plain sequence with its type made explicit; sequences of strings as they are."""
    kinds = {type(v) for v in values}
    if kinds <= {str, bytes}:
        return values
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if kinds == {int}:
        try:
            small = all(-(1 << 31) <= v < 1 << 31 for v in values)
            return np.array(values, np.int32 if small else np.int64)
        except OverflowError:
            raise RequestError(f"metadata {key!r}: an integer beyond 64 bits") from None
    if kinds <= {int, float}:
        return _singles(key, values)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise RequestError(f"metadata {key!r}: a sequence of {names}; expected bools, ints, floats or strings")


def _scalar(key: str, value: object) -> np.generic:
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        for low, high, kind in (
            (0, 1 << 32, np.uint32),
            (-(1 << 31), 0, np.int32),
            (0, 1 << 64, np.uint64),
            (-(1 << 63), 0, np.int64),
        ):
            if low <= value < high:
                return kind(value)
        raise RequestError(f"metadata {key!r}: integer {value} does not fit 64 bits")
    if isinstance(value, float):
        single: np.generic = _singles(key, [value])[0]
        return single
    raise RequestError(f"metadata {key!r}: cannot write a {type(value).__name__}")


def _value(key: str, value: WriteValue) -> bytes:
    """Value type and value."""
    if isinstance(value, str | bytes):
        return _U32.pack(ValueType.STRING) + _string(value)
    if isinstance(value, np.ndarray | Sequence):
        items = value if isinstance(value, np.ndarray | StringArray) else _array(key, value)
        if isinstance(items, np.ndarray):
            kind, raw = _numbers(key, np.atleast_1d(items))
        else:
            kind, raw = ValueType.STRING, b"".join(map(_string, items))
        return _U32.pack(ValueType.ARRAY) + _U32.pack(kind) + _U64.pack(len(items)) + raw
    kind, raw = _numbers(key, np.asarray(_scalar(key, value)))
    return _U32.pack(kind) + raw


def _name(name: str, what: str) -> bytes:
    raw = name.encode("utf-8")
    if not 1 <= len(raw) <= MAX_KEY_BYTES:
        raise RequestError(f"{what} {clip(name)} has {len(raw)} bytes, expected 1 to {MAX_KEY_BYTES}")
    return _U64.pack(len(raw)) + raw


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _header(metadata: Mapping[str, WriteValue], tensors: Sequence[Tensor], version: int, alignment: int) -> bytes:
    chunks = [b"GGUF", _U32.pack(version), _U64.pack(len(tensors)), _U64.pack(len(metadata))]
    for key, value in metadata.items():
        chunks += [_name(key, "metadata key"), _value(key, value)]
    offset = 0
    for t in tensors:
        chunks += [_name(t.name, "tensor name"), _U32.pack(len(t.shape)), *map(_U64.pack, t.shape)]
        chunks += [_U32.pack(t.format.id), _U64.pack(offset)]
        offset += _up(t.nbytes, alignment)
    raw = b"".join(chunks)
    return raw.ljust(_up(len(raw), alignment), b"\0")


def _check(metadata: Mapping[str, WriteValue], tensors: Sequence[Tensor], version: int, alignment: int) -> None:
    if version not in (2, 3):
        raise RequestError(f"GGUF version {version}, expected 2 or 3")
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise RequestError(f"alignment {alignment}, expected a power of two from 8 to {MAX_ALIGNMENT}")
    if metadata.get("general.alignment", alignment) != alignment:
        raise RequestError("metadata 'general.alignment' differs from the alignment asked for; leave it out")
    for key in _SPLIT_KEYS:
        if key in metadata:
            raise RequestError(f"metadata {key!r} is written for split files, where max_part_bytes asks for them")
    seen = set()
    for t in tensors:
        if t.name in seen:
            raise RequestError(f"tensor {clip(t.name)} is given twice")
        seen.add(t.name)
        if len(t.shape) > MAX_DIMS or min(t.shape, default=1) < 1:
            raise RequestError(f"tensor {clip(t.name)} has shape {t.shape}, expected up to {MAX_DIMS} positive numbers")
        if not callable(t.data):
            _check_data(t, t.data)


def _check_data(tensor: Tensor, data: U8) -> None:
    if data.dtype != np.uint8 or data.nbytes != tensor.nbytes:
        raise RequestError(
            f"tensor {clip(tensor.name)} ({tensor.format.name} {list(tensor.shape)}): found {data.nbytes} bytes of "
            f"{data.dtype}, expected {tensor.nbytes} of uint8"
        )


def _groups(tensors: Sequence[Tensor], alignment: int, max_part_bytes: int | None) -> list[list[Tensor]]:
    """Consecutive tensors whose data fits `max_part_bytes`; a larger tensor gets a part of its own."""
    if max_part_bytes is None:
        return [list(tensors)]
    groups: list[list[Tensor]] = [[]]
    used = 0
    for t in tensors:
        size = _up(t.nbytes, alignment)
        if groups[-1] and used + size > max_part_bytes:
            groups.append([])
            used = 0
        groups[-1].append(t)
        used += size
    if len(groups) > MAX_PARTS:
        raise RequestError(f"max_part_bytes {max_part_bytes} makes {len(groups)} parts, expected up to {MAX_PARTS}")
    return groups


def _write(file: BinaryIO, header: bytes, tensors: Sequence[Tensor], alignment: int) -> None:
    file.write(header)
    for t in tensors:
        data = t.data() if callable(t.data) else t.data
        _check_data(t, data)
        file.write(np.ascontiguousarray(data).data)
        file.write(bytes(_up(t.nbytes, alignment) - t.nbytes))
    file.flush()
    os.fsync(file.fileno())


def write_model(
    path: str | os.PathLike[str],
    metadata: Mapping[str, WriteValue],
    tensors: Iterable[Tensor],
    *,
    version: int = 3,
    alignment: int = DEFAULT_ALIGNMENT,
    max_part_bytes: int | None = None,
) -> list[Path]:
    """Write a model and return the paths written.

    Every file is written under a temporary name beside its own, and renamed when all of them are complete: a failure
    leaves nothing behind and what was there before untouched. With `max_part_bytes`, a model whose tensor data is
    larger becomes `<path without .gguf>-00001-of-0000N.gguf` and so on.

    Raises RequestError for what a GGUF file cannot hold, OSError from the file system.
    """
    path = Path(path)
    listed = list(tensors)
    _check(metadata, listed, version, alignment)
    own: dict[str, WriteValue] = {"general.alignment": np.uint32(alignment)} if alignment != DEFAULT_ALIGNMENT else {}
    whole = {**metadata, **own}
    groups = _groups(listed, alignment, max_part_bytes)
    names, headers = [path], [_header(whole, listed, version, alignment)]
    if len(groups) > 1:
        prefix = path.name.removesuffix(".gguf")
        names = [path.with_name(part_name(prefix, i, len(groups))) for i in range(len(groups))]
        headers = []
        for i, group in enumerate(groups):
            split: dict[str, WriteValue] = {
                NO: np.uint16(i),
                COUNT: np.uint16(len(groups)),
                TENSORS: np.int32(len(listed)),
            }
            headers.append(_header(split | (whole if i == 0 else own), group, version, alignment))
    token = secrets.token_hex(4)
    temporary = [name.with_name(f".{name.name}.{token}.tmp") for name in names]
    try:
        for temp, header, group in zip(temporary, headers, groups, strict=True):
            with temp.open("xb") as file:
                _write(file, header, group, alignment)
        for temp, name in zip(temporary, names, strict=True):
            os.replace(temp, name)
    finally:
        for temp in temporary:
            with contextlib.suppress(FileNotFoundError):
                temp.unlink()
    return names
