"""IQ4_NL, IQ4_XS, MXFP4."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import block, check_dequantize, expect

from minfer.quants import FORMATS

HALF = [0x00, 0x38]  # f16 0.5


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS", "MXFP4"])
def test_equal_to_the_gguf_package(name):
    check_dequantize(FORMATS[name])


def test_iq4_nl_by_hand():
    # qs[0] = 0xF0: value 0 = level 0 = -127, value 16 = level 15 = 113; 0x88: level 8 = 1
    raw = block(d=HALF, qs=[0xF0] + [0x88] * 15)
    want = expect(32, 0.5, {0: -63.5, 16: 56.5})
    assert FORMATS["IQ4_NL"].dequantize(raw).tolist() == want.tolist()


def test_iq4_xs_by_hand():
    # scales_h: two bits a sub-block, 2 everywhere but 1 in sub-block 5 (bits 10-11): 0xA6AA; low bits 0: 32 - 32 = 0.
    # Sub-block 0: low nibble of scales_l[0] = 1: 33 - 32 = 1. 5: high nibble of scales_l[2] = 3: 16 + 3 - 32 = -13.
    # qs[0] = 0x0F: value 0 = level 15 = 113, value 16 = level 0 = -127.
    # qs[80] = 0x98: value 160 = level 8 = 1, value 176 = level 9 = 13; the others are level 0 = -127
    raw = block(d=HALF, scales_h=[0xAA, 0xA6], scales_l=[0x01, 0, 0x30, 0], qs=(128, {0: 0x0F, 80: 0x98}))
    want = expect(256, -0.0, {
        range(32): 0.5 * 1 * -127,
        0: 0.5 * 1 * 113,
        range(160, 192): 0.5 * -13 * -127,
        160: 0.5 * -13 * 1,
        176: 0.5 * -13 * 13,
    })  # fmt: skip
    assert FORMATS["IQ4_XS"].dequantize(raw).tolist() == want.tolist()


def test_mxfp4_by_hand():
    # e = 128: 2^1. E2M1 code 10 is -(2^0 * 1.0), code 7 is 2^2 * 1.5 = 6
    raw = block(e=[128], qs=(16, {0: 0x7A}))
    assert FORMATS["MXFP4"].dequantize(raw).tolist() == expect(32, 0.0, {0: -2.0, 16: 12.0}).tolist()


def test_mxfp4_every_code_and_scale():
    # E2M1: sign, two exponent bits of bias 1 (0 is subnormal), one mantissa bit; code 8 is plain zero, as in ggml
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes += [0, *(-c for c in codes[1:])]
    raw = np.zeros((255, 17), np.uint8)
    raw[:, 0] = np.arange(255)
    raw[:, 1:] = np.arange(16) * 17  # both nibbles of byte i are i
    want = np.array([[c * 2.0 ** (e - 127) for c in codes] * 2 for e in range(255)])
    with np.errstate(over="ignore"):  # 6 * 2^127 is Inf in float32
        np.testing.assert_array_equal(FORMATS["MXFP4"].dequantize(raw), want.astype(np.float32))
    assert not np.signbit(FORMATS["MXFP4"].dequantize(raw)[:, 8]).any()
