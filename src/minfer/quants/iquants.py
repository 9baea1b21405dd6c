"""IQ4_NL and IQ4_XS: 4-bit codes into a table of 16 unevenly spaced levels.

Source of the layouts and of the table: ggml's `block_iq4_nl`, `block_iq4_xs` and `kvalues_iq4nl` (ggml-common.h).

    IQ4_NL  d f16, qs[16]                                18 bytes, 32 values
            x = d * level[q];  nibbles as in Q4_0
    IQ4_XS  d f16, scales_h u16, scales_l[4], qs[128]    136 bytes, 256 values in 8 sub-blocks s
            x = (d * (sc - 32)) * level[q];  16 bytes of qs a sub-block, nibbles as in Q4_0
            sc: low 4 bits in nibble s % 2 of scales_l[s // 2], high 2 bits at 2 s of scales_h
"""

from __future__ import annotations

import numpy as np

from minfer.quants.format import F32, Blocks, Format
from minfer.quants.legacy import nibbles

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _decode_iq4_nl(blocks: Blocks, out: F32) -> None:
    np.multiply(LEVELS[nibbles(blocks["qs"])], blocks["d"].astype(np.float32)[:, None], out=out)


def _decode_iq4_xs(blocks: Blocks, out: F32) -> None:
    low = np.stack([blocks["scales_l"] & 0x0F, blocks["scales_l"] >> 4], axis=-1).reshape(-1, 8)
    high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    sc = (low | (high.astype(np.uint8) << 4)).view(np.int8) - np.int8(32)
    scale = blocks["d"].astype(np.float32)[:, None] * sc
    codes = nibbles(blocks["qs"].reshape(-1, 8, 16))
    np.multiply(LEVELS[codes], scale[:, :, None], out=out.reshape(-1, 8, 32))


IQ4_NL = Format("IQ4_NL", 20, 32, 18, np.dtype([("d", "<f2"), ("qs", "u1", (16,))]), _decode_iq4_nl)
IQ4_XS = Format(
    "IQ4_XS",
    23,
    256,
    136,
    np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))]),
    _decode_iq4_xs,
)
