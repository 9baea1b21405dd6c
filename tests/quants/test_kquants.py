"""Q2_K ... Q6_K."""

from __future__ import annotations

import pytest
from oracle import block, check_dequantize, expect

from minfer.quants import FORMATS

HALF, QUARTER, ONE = [0x00, 0x38], [0x00, 0x34], [0x00, 0x3C]  # f16 0.5, 0.25, 1.0


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_equal_to_the_gguf_package(name):
    check_dequantize(FORMATS[name])


def test_q2_k_by_hand():
    # d = 1, dmin = 0.5. Sub-blocks of 16: 0: sc 3, mn 2;  2: sc 2, mn 1;  4: sc 1;  15: sc 15;  others 0.
    # qs[0] = 0b11_10_01_00 holds values 0, 32, 64, 96 = 0, 1, 2, 3 (sub-blocks 0, 2, 4, 6);
    # qs[63] = 0b11_00_00_00 holds value 128 + 96 + 31 = 255 = 3 (sub-block 15)
    raw = block(
        scales=(16, {0: 0x23, 2: 0x12, 4: 0x01, 15: 0x0F}), qs=(64, {0: 0b11100100, 63: 0b11000000}), d=ONE, dmin=HALF
    )
    want = expect(256, 0.0, {
        range(16): 3 * 0 - 0.5 * 2,
        range(32, 48): 2 * 0 - 0.5 * 1,
        32: 2 * 1 - 0.5 * 1,
        64: 1 * 2.0,
        96: 0 * 3.0,
        255: 15 * 3.0,
    })  # fmt: skip
    assert FORMATS["Q2_K"].dequantize(raw).tolist() == want.tolist()


def test_q3_k_by_hand():
    # d = 0.5. scales[8..11] = 0b10_10_10_10 gives every sub-block the high bits 2: sc = 32, less 32: 0.
    # Sub-block 0: low nibble of scales[0] = 1: 33 - 32 = 1.  7: high bits at 2 of scales[11] = 3: 48 - 32 = 16.
    # 13: high nibble of scales[5] = 15: 47 - 32 = 15, values 128 + 2 * 32 + 16 = 208 ...
    # qs[0] = 2: value 0 = 2 - 4, its bit in hmask unset. qs[32 + 16] = 3 << 4: value 208 = 3, bit 4 * 1 + 2 set.
    raw = block(
        hmask=(32, {16: 1 << 6}),
        qs=(64, {0: 0x02, 48: 0x30}),
        scales=(12, {0: 0x01, 5: 0xF0, 8: 0xAA, 9: 0xAA, 10: 0xAA, 11: 0xAE}),
        d=HALF,
    )
    want = expect(256, 0.0, {
        range(16): 0.5 * 1 * -4,
        0: 0.5 * 1 * -2,
        range(112, 128): 0.5 * 16 * -4,
        range(208, 224): 0.5 * 15 * -4,
        208: 0.5 * 15 * 3,
    })  # fmt: skip
    assert FORMATS["Q3_K"].dequantize(raw).tolist() == want.tolist()


# Scales of Q4_K and Q5_K. Sub-block 0: sc = 0x43 & 63 = 3, mn = 0x82 & 63 = 2. Sub-block 4, in scales[8] = 0x5A:
# sc = 10 + 16 * (0x43 >> 6) = 26, mn = 5 + 16 * (0x82 >> 6) = 37. The others are 0.
SCALES = (12, {0: 0x43, 4: 0x82, 8: 0x5A})


def test_q4_k_by_hand():
    # d = 0.5, dmin = 0.25. qs[0] = 0x71: value 0 = 1, value 32 = 7 (sub-block 1, scale 0); qs[64 + 5]: value 133 = 15
    raw = block(d=HALF, dmin=QUARTER, scales=SCALES, qs=(128, {0: 0x71, 69: 0x0F}))
    want = expect(256, 0.0, {
        range(32): -0.25 * 2,
        0: 0.5 * 3 * 1 - 0.25 * 2,
        range(128, 160): -0.25 * 37,
        133: 0.5 * 26 * 15 - 0.25 * 37,
    })  # fmt: skip
    assert FORMATS["Q4_K"].dequantize(raw).tolist() == want.tolist()


def test_q5_k_by_hand():
    # as Q4_K, with bit 0 of qh[0] (value 0: 1 + 16) and bit 4 of qh[5] (sub-block 4, value 133: 15 + 16)
    raw = block(d=HALF, dmin=QUARTER, scales=SCALES, qh=(32, {0: 0x01, 5: 0x10}), qs=(128, {0: 0x71, 69: 0x0F}))
    want = expect(256, 0.0, {
        range(32): -0.25 * 2,
        0: 0.5 * 3 * 17 - 0.25 * 2,
        range(128, 160): -0.25 * 37,
        133: 0.5 * 26 * 31 - 0.25 * 37,
    })  # fmt: skip
    assert FORMATS["Q5_K"].dequantize(raw).tolist() == want.tolist()


def test_q6_k_by_hand():
    # d = 0.25. Sub-block scales 0: 2, 7: 1, 9: -3. A code of 0 is -32.
    # value 0: ql[0] low = 5, qh[0] bits 0-1 = 1: 5 + 16 - 32 = -11
    # value 127 (h 0, j 3, l 31): ql[32 + 31] high = 9, qh[31] bits 6-7 = 2: 9 + 32 - 32 = 9
    # value 144 (h 1, j 0, l 16): ql[64 + 16] low = 15, qh[32 + 16] bits 0-1 = 3: 15 + 48 - 32 = 31
    raw = block(
        ql=(128, {0: 0x05, 63: 0x90, 80: 0x0F}),
        qh=(64, {0: 0x01, 31: 0x80, 48: 0x03}),
        scales=(16, {0: 2, 7: 1, 9: 256 - 3}),
        d=QUARTER,
    )
    want = expect(256, 0.0, {
        range(16): 0.25 * 2 * -32,
        0: 0.25 * 2 * -11,
        range(112, 128): 0.25 * 1 * -32,
        127: 0.25 * 1 * 9,
        range(144, 160): 0.25 * -3 * -32,
        144: 0.25 * -3 * 31,
    })  # fmt: skip
    assert FORMATS["Q6_K"].dequantize(raw).tolist() == want.tolist()
