"""GGUF files put together byte by byte, well-formed or not, without the writer under test."""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = dict(zip(range(13), "BbHhIif?__Qqd", strict=True))

LARGEST = (1 << 64) - 1


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(raw: bytes, length: int | None = None) -> bytes:
    return u64(len(raw) if length is None else length) + raw


def kv(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + u32(kind) + value


def number(key: bytes, kind: int, value: float) -> bytes:
    return kv(key, kind, struct.pack("<" + _CODES[kind], value))


def array(key: bytes, kind: int, count: int, raw: bytes) -> bytes:
    return kv(key, ARRAY, u32(kind) + u64(count) + raw)


def tensor(name: bytes = b"a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def model(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these metadata and tensor entries; `data` starts at the next multiple of `alignment`."""
    entries, tensors = entries or [], tensors or []
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors) + u64(len(entries) if n_kv is None else n_kv)
    head += b"".join(entries) + b"".join(tensors)
    if data:
        head += bytes(-len(head) % alignment)
    return head + data
