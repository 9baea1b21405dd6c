"""Bytes to a checked header. Nothing here trusts a number in the file before holding it against the file's size.

GGUF, little-endian throughout (source: the GGUF specification in ggml's docs, and its gguf.cpp):

    magic "GGUF", version u32 (2 or 3; the two differ only in that 3 may be big-endian), n_tensors u64, n_kv u64
    n_kv times:       key string, value type u32, value
    n_tensors times:  name string, n_dims u32, dims u64[n_dims] feature-fastest, type u32, offset u64
    padding to `general.alignment` (32 where absent), then the data that the offsets count from

    string = length u64, bytes;   array = element type u32, count u64, elements;   bool = one byte, 0 or 1
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from minfer.errors import MinferError, ModelFileError
from minfer.gguf.values import DTYPES, MetaValue, StringArray, ValueType
from minfer.quants import Format, known_by_id

if TYPE_CHECKING:
    from mmap import mmap
    from pathlib import Path

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 24
MAX_DIMS = 4
MAX_KEY_BYTES = 65535  # the specification's limit; ours for tensor names too
MIN_KV_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# What people pass by mistake, by its first bytes.
_LOOK_ALIKES = {
    b"ggml": "a GGML file from before GGUF; convert the model again",
    b"lmgg": "a GGML file from before GGUF; convert the model again",
    b"tjgg": "a GGJT file from before GGUF; convert the model again",
    b"fmgg": "a GGMF file from before GGUF; convert the model again",
    b"FUGG": "a byte-swapped GGUF file; minfer reads little-endian files only",
    b"PK\x03\x04": "a ZIP archive (a PyTorch checkpoint?); convert the model to GGUF",
    b"vers": "perhaps a Git LFS pointer; fetch the file itself",
    b"<!DO": "a web page; the download failed",
    b"<htm": "a web page; the download failed",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is feature-fastest, as in the file: a matmul weight is (n_in, n_out)."""

    name: str
    format: Format  # may be size-only: see Format.computes
    shape: tuple[int, ...]  # () is a scalar
    part: int  # index into ModelFile.parts
    offset: int  # bytes from the start of that part

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[0] if self.shape else 1)

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Header:
    """One file's header, checked. Offsets of `tensors` are from the start of the file."""

    version: int
    alignment: int
    metadata: dict[str, MetaValue]
    value_types: dict[str, ValueType]  # of an array: its elements' type
    tensors: dict[str, TensorInfo]
    data_offset: int


def clip(text: str | bytes, limit: int = 80) -> str:
    """A name from a file, quoted for an error message and cut to a bearable length."""
    shown = repr(text[:limit])
    return shown + "..." if len(text) > limit else shown


class _Cursor:
    """Reads forward through a file's bytes; every failure names the file, the place and the byte."""

    def __init__(self, buffer: mmap | bytes, path: Path) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.path = path
        self.at = 0
        self.where = "header"  # what is being read, for messages

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise ModelFileError(f"{self.path}: {self.where}, at byte {self.at if at is None else at}: {message}")

    def need(self, n_bytes: int, what: str) -> None:
        left = self.size - self.at
        if n_bytes > left:
            self.fail(
                f"{what} needs {n_bytes} bytes but the file of {self.size} bytes has {left} left; "
                "it is truncated or damaged: fetch it again"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32.unpack_from(self.buffer, self.at)[0]
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64.unpack_from(self.buffer, self.at)[0]
        self.at += 8
        return value

    def string(self, what: str) -> bytes:
        n = self.u64(f"the length of {what}")
        self.need(n, what)
        value = self.buffer[self.at : self.at + n]
        self.at += n
        return value

    def name(self, what: str) -> str:
        """A key or tensor name: UTF-8, 1 to 65535 bytes."""
        start = self.at
        raw = self.string(what)
        if not raw or len(raw) > MAX_KEY_BYTES:
            self.fail(f"{what} has {len(raw)} bytes, expected 1 to {MAX_KEY_BYTES}; the file is damaged", start)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} {clip(raw)} is not UTF-8; the file is damaged", start)

    def value_type(self, what: str) -> ValueType:
        number = self.u32(what)
        try:
            return ValueType(number)
        except ValueError:
            self.fail(
                f"unknown {what} {number}, expected 0 to {max(ValueType)}; the file is damaged or newer than minfer",
                self.at - 4,
            )

    def scalar(self, kind: ValueType) -> MetaValue:
        if kind is ValueType.STRING:
            raw = self.string("the value")
            try:
                return raw.decode("utf-8")
            except UnicodeDecodeError:
                return raw
        dtype = DTYPES[kind]
        self.need(dtype.itemsize, "the value")
        if kind is ValueType.BOOL and self.buffer[self.at] > 1:
            self.fail(f"a bool is {self.buffer[self.at]}, expected 0 or 1; the file is damaged")
        value: MetaValue = np.frombuffer(self.buffer, dtype, 1, self.at)[0].item()
        self.at += dtype.itemsize
        return value

    def array(self, kind: ValueType, count: int) -> MetaValue:
        if kind is ValueType.STRING:
            return self.strings(count)
        if kind is ValueType.ARRAY:
            self.fail("an array of arrays, expected an array of numbers, bools or strings")
        dtype = DTYPES[kind]
        self.need(count * dtype.itemsize, f"an array of {count} {kind.name}")
        if count == 0:
            values = np.empty(0, dtype)
        else:
            if kind is ValueType.BOOL:
                octets = np.frombuffer(self.buffer, np.uint8, count, self.at)
                if octets.max() > 1:
                    bad = int(np.flatnonzero(octets > 1)[0])
                    self.fail(f"bool {bad} is {octets[bad]}, expected 0 or 1; the file is damaged", self.at + bad)
            values = np.frombuffer(self.buffer, dtype, count, self.at).copy()  # metadata outlives the mapping
        values.flags.writeable = False
        self.at += count * dtype.itemsize
        return values

    def strings(self, count: int) -> StringArray:
        """The hot spot of opening a file: one step a token, so the checks are made once, behind the loop."""
        self.need(count * 8, f"an array of {count} STRING")
        buffer, start, at = self.buffer, self.at, self.at
        unpack, ends = _U64.unpack_from, array("q")
        append = ends.append
        try:
            for _ in range(count):
                at += 8 + unpack(buffer, at)[0]
                append(at)
        except (struct.error, OverflowError):  # a length beyond the end, or an end beyond 63 bits
            at = self.size + 1
        if at > self.size:
            if ends and ends[-1] > self.size:  # this string was too long, and its follower tripped over it
                ends.pop()
            self.fail(
                f"string {len(ends)} of {count} runs past the end of the file of {self.size} bytes; "
                "it is truncated or damaged: fetch it again",
                ends[-1] if ends else start,
            )
        self.at = at
        spans = np.empty((count, 2), np.int64)
        if count:
            spans[:, 1] = ends
            spans[:, 1] -= start
            spans[0, 0] = 8
            spans[1:, 0] = spans[:-1, 1] + 8
        return StringArray(buffer[start:at], spans)


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata entries."""
    magic = bytes(cursor.buffer[:4])
    if magic != b"GGUF":
        hint = _LOOK_ALIKES.get(magic, "not a GGUF file")
        cursor.fail(f"magic is {magic!r}, expected b'GGUF': {hint}", 0)
    cursor.need(24, "a GGUF header")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            cursor.fail("the file is big-endian, minfer reads little-endian files only; convert the model again", 4)
        advice = "convert the model again" if version < 2 else "it is damaged, or update minfer"
        cursor.fail(f"GGUF version {version}, expected 2 or 3; {advice}", 4)
    counts = []
    for what, smallest in (("tensors", MIN_TENSOR_BYTES), ("metadata entries", MIN_KV_BYTES)):
        n = cursor.u64(f"the number of {what}")
        if n * smallest > cursor.size:
            cursor.fail(f"{n} {what} cannot fit in a file of {cursor.size} bytes; it is damaged", cursor.at - 8)
        counts.append(n)
    return version, counts[0], counts[1]


def _read_metadata(cursor: _Cursor, n_kv: int) -> tuple[dict[str, MetaValue], dict[str, ValueType]]:
    metadata: dict[str, MetaValue] = {}
    types: dict[str, ValueType] = {}
    for i in range(n_kv):
        cursor.where = f"metadata entry {i} of {n_kv}"
        start = cursor.at
        key = cursor.name("the key")
        cursor.where = f"metadata key {clip(key)}"
        if key in metadata:
            cursor.fail("the key occurs twice; the file is damaged", start)
        kind = cursor.value_type("value type")
        if kind is ValueType.ARRAY:
            kind = cursor.value_type("array element type")
            count = cursor.u64("the array's length")
            metadata[key] = cursor.array(kind, count)
        else:
            metadata[key] = cursor.scalar(kind)
        types[key] = kind
    return metadata, types


def _alignment(cursor: _Cursor, metadata: dict[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    cursor.where = "metadata key 'general.alignment'"
    expected = f"expected a power of two from 8 to {MAX_ALIGNMENT}"
    if isinstance(value, bool) or not isinstance(value, int):
        cursor.fail(f"found {clip(str(value))}, {expected}")
    if value < 8 or value > MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"found {value}, {expected}")
    return value


def _read_tensor(cursor: _Cursor, part: int) -> TensorInfo:
    """One entry; its offset still counts from the start of the data."""
    name = cursor.name("the tensor's name")
    cursor.where = f"tensor {clip(name)}"
    n_dims = cursor.u32("the number of dimensions")
    if n_dims > MAX_DIMS:
        cursor.fail(f"{n_dims} dimensions, expected at most {MAX_DIMS}; the file is damaged", cursor.at - 4)
    shape = []
    for axis in range(n_dims):
        dim = cursor.u64(f"dimension {axis}")
        if dim == 0 or dim >= 1 << 63:
            signed = dim if dim < 1 << 63 else dim - (1 << 64)
            cursor.fail(f"dimension {axis} is {signed}, expected at least 1; the file is damaged", cursor.at - 8)
        shape.append(dim)
    type_id = cursor.u32("the tensor's type")
    offset = cursor.u64("the tensor's offset")
    try:
        tensor = TensorInfo(name, known_by_id(type_id), tuple(shape), part, offset)
        _ = tensor.row_bytes  # raises where a row is not whole blocks
    except MinferError as error:
        cursor.fail(str(error), cursor.at - 12)
    return tensor


def _place(cursor: _Cursor, tensors: dict[str, TensorInfo], data_offset: int, alignment: int) -> dict[str, TensorInfo]:
    """Offsets from the start of the file; each tensor inside it, aligned, and clear of every other."""
    placed = {}
    for tensor in tensors.values():
        cursor.where = f"tensor {clip(tensor.name)}"
        offset = data_offset + tensor.offset
        if tensor.offset % alignment:
            cursor.fail(f"data offset {tensor.offset} is not a multiple of the alignment {alignment}", offset)
        if offset + tensor.nbytes > cursor.size:
            cursor.fail(
                f"its {tensor.nbytes} bytes ({tensor.format.name} {list(tensor.shape)}) end at byte "
                f"{offset + tensor.nbytes} of a file of {cursor.size}; it is truncated or damaged: fetch it again",
                offset,
            )
        placed[tensor.name] = TensorInfo(tensor.name, tensor.format, tensor.shape, tensor.part, offset)
    previous: TensorInfo | None = None
    for tensor in sorted(placed.values(), key=lambda t: t.offset):
        if previous is not None and tensor.offset < previous.offset + previous.nbytes:
            cursor.where = f"tensor {clip(tensor.name)}"
            cursor.fail(
                f"overlaps tensor {clip(previous.name)}, whose {previous.nbytes} bytes start at {previous.offset}; "
                "the file is damaged",
                tensor.offset,
            )
        previous = tensor
    return placed


def read_header(buffer: mmap | bytes, path: Path, part: int = 0) -> Header:
    """The header at the start of `buffer`, which holds the whole file; ModelFileError says what is wrong with it."""
    cursor = _Cursor(buffer, path)
    version, n_tensors, n_kv = _read_preamble(cursor)
    metadata, types = _read_metadata(cursor, n_kv)
    alignment = _alignment(cursor, metadata)
    tensors: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        cursor.where = f"tensor {i} of {n_tensors}"
        start = cursor.at
        tensor = _read_tensor(cursor, part)
        if tensor.name in tensors:
            cursor.fail("the name occurs twice; the file is damaged", start)
        tensors[tensor.name] = tensor
    data_offset = -(-cursor.at // alignment) * alignment
    return Header(version, alignment, metadata, types, _place(cursor, tensors, data_offset, alignment), data_offset)
