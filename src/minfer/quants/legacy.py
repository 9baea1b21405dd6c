"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 values that share one f16 scale, and in the _1 types one f16 minimum.

Source of the layouts: ggml's `block_q4_0` ... `block_q8_0` (ggml-common.h). In the 4 and 5 bit types byte i of `qs`
holds value i in its low nibble and value i + 16 in its high nibble; bit i of `qh` is the fifth bit of value i.

    Q4_0  d f16, qs[16]               x = d * (q - 8)       18 bytes
    Q4_1  d f16, m f16, qs[16]        x = d * q + m         20 bytes
    Q5_0  d f16, qh[4], qs[16]        x = d * (q - 16)      22 bytes
    Q5_1  d f16, m f16, qh[4], qs[16] x = d * q + m         24 bytes
    Q8_0  d f16, qs[32] int8          x = d * q             34 bytes

Rounding when quantizing is that of ggml's reference C code, so that a file equals one written by its tools: the
4 and 5 bit types add one half and truncate (a tie goes up), Q8_0 is C's `roundf` (a tie goes away from zero). The
scale is rounded to f16 half to even, and the codes are made with the scale before that rounding. A block whose scale
is so small that its inverse is not finite gets codes as if its scale were zero: it decodes to zeros (or its minimum)
either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.quants.format import F32, U8, Blocks, Format, to_f16

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F16 = NDArray[np.float16]


def _inverse(scale: F32) -> F32:
    """1 / scale, or 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(1) / scale
    inverse[~np.isfinite(inverse)] = 0
    return inverse


def nibbles(qs: U8) -> U8:
    """Low nibbles, then high nibbles: uint8 [..., k] to [..., 2 k]."""
    return np.concatenate([qs & 0x0F, qs >> 4], axis=-1)


def _five_bits(blocks: Blocks) -> U8:
    """Codes 0..31 of a Q5 block [b, 32]."""
    codes = nibbles(blocks["qs"])
    codes |= np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4
    return codes


def _pack_nibbles(codes: U8) -> U8:
    packed: U8 = np.bitwise_or(codes[:, :16] & 0x0F, codes[:, 16:] << 4, dtype=np.uint8)
    return packed


def _pack_fifth_bits(codes: U8) -> U8:
    bits: U8 = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return bits


def _scale(codes: NDArray[np.integer[Any]], d: F16, out: F32) -> None:
    np.multiply(codes, d.astype(np.float32)[:, None], out=out, dtype=np.float32)


def _decode_q4_0(blocks: Blocks, out: F32) -> None:
    _scale(nibbles(blocks["qs"]).view(np.int8) - np.int8(8), blocks["d"], out)


def _decode_q4_1(blocks: Blocks, out: F32) -> None:
    _scale(nibbles(blocks["qs"]), blocks["d"], out)
    out += blocks["m"].astype(np.float32)[:, None]


def _decode_q5_0(blocks: Blocks, out: F32) -> None:
    _scale(_five_bits(blocks).view(np.int8) - np.int8(16), blocks["d"], out)


def _decode_q5_1(blocks: Blocks, out: F32) -> None:
    _scale(_five_bits(blocks), blocks["d"], out)
    out += blocks["m"].astype(np.float32)[:, None]


def _decode_q8_0(blocks: Blocks, out: F32) -> None:
    _scale(blocks["qs"], blocks["d"], out)


def _symmetric_codes(values: F32, half: int, name: str) -> tuple[F16, U8]:
    """Scale [b] and codes 0..2*half-1 [b, 32]: the value of largest magnitude becomes code 0, so -half exactly."""
    widest = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)
    d = widest / np.float32(-half)
    stored = to_f16(d[:, 0], name, "block scale")
    codes = np.trunc(values * _inverse(d) + np.float32(half + 0.5))
    return stored, codes.clip(0, 2 * half - 1).astype(np.uint8)


def _offset_codes(values: F32, top: int, name: str) -> tuple[F16, F16, U8]:
    """Scale [b], minimum [b] and codes 0..top [b, 32]."""
    low = values.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a range beyond float32 gives Inf, which to_f16 refuses
        d = (values.max(axis=-1, keepdims=True) - low) / np.float32(top)
    stored, minimum = to_f16(d[:, 0], name, "block scale"), to_f16(low[:, 0], name, "block minimum")
    codes = np.trunc((values - low) * _inverse(d) + np.float32(0.5))
    return stored, minimum, codes.astype(np.uint8)  # at most top: top + 0.5 is far from the next whole number


def _encode_q4_0(values: F32, blocks: Blocks) -> None:
    blocks["d"], codes = _symmetric_codes(values, 8, "Q4_0")
    blocks["qs"] = _pack_nibbles(codes)


def _encode_q4_1(values: F32, blocks: Blocks) -> None:
    blocks["d"], blocks["m"], codes = _offset_codes(values, 15, "Q4_1")
    blocks["qs"] = _pack_nibbles(codes)


def _encode_q5_0(values: F32, blocks: Blocks) -> None:
    blocks["d"], codes = _symmetric_codes(values, 16, "Q5_0")
    blocks["qh"], blocks["qs"] = _pack_fifth_bits(codes), _pack_nibbles(codes)


def _encode_q5_1(values: F32, blocks: Blocks) -> None:
    blocks["d"], blocks["m"], codes = _offset_codes(values, 31, "Q5_1")
    blocks["qh"], blocks["qs"] = _pack_fifth_bits(codes), _pack_nibbles(codes)


def _encode_q8_0(values: F32, blocks: Blocks) -> None:
    magnitude = np.abs(values)
    d = magnitude.max(axis=-1, keepdims=True) / np.float32(127)
    blocks["d"] = to_f16(d[:, 0], "Q8_0", "block scale")
    scaled = magnitude * _inverse(d)
    # roundf: adding 0.5 first would itself round, and send 0.49999997 to 1
    whole = np.floor(scaled)
    codes = whole + (scaled - whole >= np.float32(0.5))
    blocks["qs"] = np.copysign(codes, values).astype(np.int8)


_D, _M, _QH, _QS = ("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))

Q4_0 = Format("Q4_0", 2, 32, 18, np.dtype([_D, _QS]), _decode_q4_0, _encode_q4_0)
Q4_1 = Format("Q4_1", 3, 32, 20, np.dtype([_D, _M, _QS]), _decode_q4_1, _encode_q4_1)
Q5_0 = Format("Q5_0", 6, 32, 22, np.dtype([_D, _QH, _QS]), _decode_q5_0, _encode_q5_0)
Q5_1 = Format("Q5_1", 7, 32, 24, np.dtype([_D, _M, _QH, _QS]), _decode_q5_1, _encode_q5_1)
Q8_0 = Format("Q8_0", 8, 32, 34, np.dtype([_D, ("qs", "i1", (32,))]), _decode_q8_0, _encode_q8_0)
