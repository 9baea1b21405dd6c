"""Q2_K ... Q6_K: super-blocks of 256 values; 8 or 16 sub-blocks with small integer scales under one f16 scale.

Source of the layouts: ggml's `block_q2_K` ... `block_q6_K` (ggml-common.h). `sc` and `mn` are a sub-block's integer
scale and minimum; s counts sub-blocks, l values within 32, h the two halves of 128, g the four groups of 64.

    Q2_K  scales[16], qs[64], d f16, dmin f16            84 bytes, 16 values a sub-block
          x = (d * sc) * q - (dmin * mn);  scales[s] = sc (low nibble), mn (high nibble)
          value 128 h + 32 j + l has q = 2 bits of qs[32 h + l] at 2 j
    Q3_K  hmask[32], qs[64], scales[12], d f16           110 bytes, 16 values a sub-block
          x = (d * (sc - 32)) * q;  q as in Q2_K, less 4 unless bit 4 h + j of hmask[l] is set
          sc has 6 bits: low 4 in nibble s // 8 of scales[s % 8], high 2 at 2 (s // 4) of scales[8 + s % 4]
    Q4_K  d f16, dmin f16, scales[12], qs[128]           144 bytes, 32 values a sub-block
          x = (d * sc) * q - (dmin * mn);  value 64 g + l: low nibble of qs[32 g + l], 64 g + 32 + l: high nibble
          sc, mn have 6 bits; s < 4: the low 6 bits of scales[s], scales[s + 4]; s >= 4: low 4 bits in the low, high
          nibble of scales[s + 4], high 2 bits on top of scales[s - 4], scales[s]
    Q5_K  d f16, dmin f16, scales[12], qh[32], qs[128]   176 bytes; Q4_K with bit s of qh[l] as the fifth bit of q
    Q6_K  ql[128], qh[64], scales[16] int8, d f16        210 bytes, 16 values a sub-block
          x = (d * sc) * (q - 32);  value 128 h + 32 j + l has its low 4 bits in nibble j // 2 of
          ql[64 h + 32 (j % 2) + l], its high 2 bits at 2 j of qh[32 h + l]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.quants.format import F32, U8, Blocks, Format

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHIFTS_2 = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _two_bits(qs: U8) -> U8:
    """[b, 32 k] bytes to [b, k, 4, 32] two-bit fields: field j of byte l lies at [j, l]."""
    fields = qs.reshape(len(qs), -1, 1, 32) >> _SHIFTS_2
    fields &= 3
    return fields


def _scaled(codes: NDArray[np.integer[Any]], scales: F32, out: F32) -> None:
    """out [b, 256] = codes (any shape of b * 256) * scales [b, n_sub], a sub-block being consecutive values."""
    shape = (*scales.shape, 256 // scales.shape[1])
    np.multiply(codes.reshape(shape), scales[:, :, None], out=out.reshape(shape), dtype=np.float32)


def _less_minimum(minimums: F32, out: F32) -> None:
    per_sub = out.reshape(*minimums.shape, -1)
    per_sub -= minimums[:, :, None]


def _f32(blocks: Blocks, name: str) -> F32:
    field: F32 = blocks[name].astype(np.float32)[:, None]
    return field


def _decode_q2_k(blocks: Blocks, out: F32) -> None:
    scales = blocks["scales"]
    _scaled(_two_bits(blocks["qs"]), _f32(blocks, "d") * (scales & 0x0F), out)
    _less_minimum(_f32(blocks, "dmin") * (scales >> 4), out)


def _decode_q3_k(blocks: Blocks, out: F32) -> None:
    packed = blocks["scales"]
    low = np.concatenate([packed[:, :8] & 0x0F, packed[:, :8] >> 4], axis=-1)
    high = ((packed[:, None, 8:] >> _SHIFTS_2) & 3).reshape(-1, 16)
    sc = (low | (high << 4)).view(np.int8) - np.int8(32)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    codes = _two_bits(blocks["qs"]).reshape(-1, 8, 32)
    codes |= ((blocks["hmask"][:, None, :] >> bit) & 1) << 2  # now 0..7, where the set bit stands for "no -4"
    _scaled(codes.view(np.int8) - np.int8(4), _f32(blocks, "d") * sc, out)


def _scales_and_minimums(packed: U8) -> tuple[U8, U8]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales [b, 8] and eight 6-bit minimums [b, 8]."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minimums


def _group_nibbles(qs: U8) -> U8:
    """[b, 128] bytes to [b, 8, 32] codes: the low nibbles of 32 bytes, then their high nibbles."""
    groups = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2).reshape(-1, 8, 32)


def _decode_q4_k(blocks: Blocks, out: F32) -> None:
    sc, mn = _scales_and_minimums(blocks["scales"])
    _scaled(_group_nibbles(blocks["qs"]), _f32(blocks, "d") * sc, out)
    _less_minimum(_f32(blocks, "dmin") * mn, out)


def _decode_q5_k(blocks: Blocks, out: F32) -> None:
    sc, mn = _scales_and_minimums(blocks["scales"])
    bit = np.arange(8, dtype=np.uint8)[:, None]
    codes = _group_nibbles(blocks["qs"])
    codes |= ((blocks["qh"][:, None, :] >> bit) & 1) << 4
    _scaled(codes, _f32(blocks, "d") * sc, out)
    _less_minimum(_f32(blocks, "dmin") * mn, out)


def _decode_q6_k(blocks: Blocks, out: F32) -> None:
    ql = blocks["ql"].reshape(-1, 2, 1, 64)
    codes = np.concatenate([ql & 0x0F, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    codes |= _two_bits(blocks["qh"]) << 4
    _scaled(codes.view(np.int8) - np.int8(32), _f32(blocks, "d") * blocks["scales"], out)


_D, _DMIN, _SCALES = ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,))
_QS_2, _QS_4, _QH = ("qs", "u1", (64,)), ("qs", "u1", (128,)), ("qh", "u1", (32,))

Q2_K = Format("Q2_K", 10, 256, 84, np.dtype([("scales", "u1", (16,)), _QS_2, _D, _DMIN]), _decode_q2_k)
Q3_K = Format("Q3_K", 11, 256, 110, np.dtype([("hmask", "u1", (32,)), _QS_2, _SCALES, _D]), _decode_q3_k)
Q4_K = Format("Q4_K", 12, 256, 144, np.dtype([_D, _DMIN, _SCALES, _QS_4]), _decode_q4_k)
Q5_K = Format("Q5_K", 13, 256, 176, np.dtype([_D, _DMIN, _SCALES, _QH, _QS_4]), _decode_q5_k)
Q6_K = Format(
    "Q6_K",
    14,
    256,
    210,
    np.dtype([("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), _D]),
    _decode_q6_k,
)
