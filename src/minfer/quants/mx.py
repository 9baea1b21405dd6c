"""MXFP4: 32 four-bit floats (E2M1) under one power-of-two scale (E8M0), the OCP microscaling format.

Source of the layout: ggml's `block_mxfp4`; of the number formats: OCP Microscaling Formats v1.0.

    MXFP4  e u8, qs[16]    17 bytes, 32 values
           x = 2^(e - 127) * E2M1[q];  nibbles as in Q4_0

ggml keeps the eight magnitudes doubled (0 1 2 3 4 6 8 12) so that they are integers, under 2^(e - 128); so do we, and
the product is exact either way. Two corners follow ggml and not OCP: code 8 is plain zero, not minus zero, and e = 255
is one more power of two, not NaN (no tool writes it).
"""

from __future__ import annotations

import numpy as np

from minfer.quants.format import F32, Blocks, Format
from minfer.quants.legacy import nibbles

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _decode_mxfp4(blocks: Blocks, out: F32) -> None:
    scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)
    np.multiply(DOUBLED[nibbles(blocks["qs"])], scale[:, None], out=out)


MXFP4 = Format("MXFP4", 39, 32, 17, np.dtype([("e", "u1"), ("qs", "u1", (16,))]), _decode_mxfp4)
