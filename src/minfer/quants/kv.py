"""KV row formats: how one cell's key or value row lies in memory.

    f32    n float32                                               4 n bytes
    f16    n float16, round half to even                           2 n bytes, padded to 4
    q8_0   n / 32 blocks of (d f16, qs[32] int8), as Q8_0          34 n / 32 bytes, padded to 4

q8_0: d = max|x| / 127 in float32; q = x * (1 / d) rounded half to even (what a GPU's `rint` does; the weight format
Q8_0 rounds ties away from zero instead); d is stored as f16, and x is read back as d * q. Where 1 / d is not finite,
q is 0. Padding bytes are zero.

What a format cannot hold is refused, never changed in silence. A finite value that f16 would turn into Inf, and a NaN,
an Inf or a block above 127 * 65504 in q8_0, raise NumericsError: an Inf in a key row would make attention ignore the
cell or turn NaN, far from the cause, and clamping would be wrong without a sign. f32 and f16 keep a NaN or Inf that
they are given. A kernel that cannot raise stores what its conversion gives (Inf), for the check on the logits to find.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minfer.errors import NumericsError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minfer.quants.format import F32, U8


@dataclass(frozen=True)
class KvFormat:
    """One KV row format. `block` values share `block_bytes`; a row is whole blocks, padded to 4 bytes."""

    name: str
    block: int
    block_bytes: int
    _pack: Callable[[F32], U8] = field(repr=False, compare=False)
    _unpack: Callable[[U8], F32] = field(repr=False, compare=False)

    def _packed_bytes(self, n: int) -> int:
        if n <= 0 or n % self.block:
            raise RequestError(
                f"a KV row of {n} values cannot be {self.name}: expected a positive multiple of {self.block}"
                + ("; use f16 or f32" if self.block > 1 else "")
            )
        return n // self.block * self.block_bytes

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` values, padding included; RequestError where `n` is not whole blocks."""
        return -(-self._packed_bytes(n) // 4) * 4

    def pack(self, values: F32) -> U8:
        """float32 `[..., n]` to a new uint8 array `[..., row_bytes(n)]`; NumericsError as the module says."""
        if values.dtype != np.float32 or values.ndim == 0:
            raise RequestError(f"KV {self.name}: expected float32 rows, found {values.dtype} of shape {values.shape}")
        used = self._packed_bytes(values.shape[-1])
        out = np.zeros((*values.shape[:-1], self.row_bytes(values.shape[-1])), np.uint8)
        out[..., :used] = self._pack(np.ascontiguousarray(values))
        return out

    def unpack(self, raw: U8, n: int) -> F32:
        """uint8 `[..., row_bytes(n)]` to a new float32 array `[..., n]`."""
        if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] != self.row_bytes(n):
            raise RequestError(
                f"KV {self.name}: expected uint8 rows of {self.row_bytes(n)} bytes for {n} values, "
                f"found {raw.dtype} of shape {raw.shape}"
            )
        return self._unpack(np.ascontiguousarray(raw[..., : self._packed_bytes(n)]))


_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])


def _half(values: F32, name: str, what: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    try:
        with np.errstate(over="raise"):
            return values.astype("<f2")
    except FloatingPointError:
        raise NumericsError(
            f"KV {name}: a {what} of {np.abs(values[np.isfinite(values)]).max():g} is beyond the range of f16 (65504); "
            "run with the KV format f32"
        ) from None


def _pack_f32(values: F32) -> U8:
    return values.astype("<f4", copy=False).view(np.uint8)


def _unpack_f32(raw: U8) -> F32:
    return raw.view("<f4").astype(np.float32)


def _pack_f16(values: F32) -> U8:
    return _half(values, "f16", "value").view(np.uint8)


def _unpack_f16(raw: U8) -> F32:
    return raw.view("<f2").astype(np.float32)


def _pack_q8_0(values: F32) -> U8:
    if not np.isfinite(values).all():
        raise NumericsError("KV q8_0: a row holds NaN or Inf, which a block of 8-bit codes cannot keep")
    x = values.reshape(*values.shape[:-1], values.shape[-1] // 32, 32)
    d = np.abs(x).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    inverse[~np.isfinite(inverse)] = 0
    blocks = np.empty(d.shape, _Q8_0)
    blocks["d"] = _half(d, "q8_0", "block scale")
    blocks["qs"] = np.rint(x * inverse[..., None])
    return blocks.view(np.uint8)


def _unpack_q8_0(raw: U8) -> F32:
    blocks = raw.view(_Q8_0)
    with np.errstate(invalid="ignore"):
        x: F32 = blocks["d"].astype(np.float32)[..., None] * blocks["qs"]
    return x.reshape(*raw.shape[:-1], blocks.shape[-1] * 32)


KV_FORMATS: Mapping[str, KvFormat] = {
    f.name: f
    for f in (
        KvFormat("f32", 1, 4, _pack_f32, _unpack_f32),
        KvFormat("f16", 1, 2, _pack_f16, _unpack_f16),
        KvFormat("q8_0", 32, 34, _pack_q8_0, _unpack_q8_0),
    )
}


def kv_format(name: str) -> KvFormat:
    """The KV format of exactly this name; RequestError that lists the names otherwise."""
    found = KV_FORMATS.get(name)
    if found is None:
        raise RequestError(f"unknown KV format {name!r}: expected one of {', '.join(KV_FORMATS)}")
    return found
