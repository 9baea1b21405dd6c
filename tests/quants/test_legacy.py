"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import block, check_dequantize, check_quantize, expect

from minfer.errors import RequestError
from minfer.quants import FORMATS

LEGACY = [FORMATS[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
by_name = pytest.mark.parametrize("fmt", LEGACY, ids=lambda f: f.name)


@by_name
def test_equal_to_the_gguf_package(fmt):
    check_dequantize(fmt)
    check_quantize(fmt)


def test_q4_0_by_hand():
    # d = 0x3800 = 0.5; byte 0 = 0x3F: value 0 = 0.5 * (15 - 8), value 16 = 0.5 * (3 - 8); 0x88 is zero twice
    raw = block(d=[0x00, 0x38], qs=[0x3F] + [0x88] * 15)
    want = expect(32, 0.0, {0: 3.5, 16: -2.5})
    assert FORMATS["Q4_0"].dequantize(raw).tolist() == want.tolist()


def test_q4_1_by_hand():
    # d = 0x3400 = 0.25, m = 0xBC00 = -1; 0x21: 0.25 * 1 - 1, 0.25 * 2 - 1; 0xF0: 0 - 1, 0.25 * 15 - 1; 4: 1 - 1
    raw = block(d=[0x00, 0x34], m=[0x00, 0xBC], qs=[0x21] + [0x44] * 14 + [0xF0])
    want = expect(32, 0.0, {0: -0.75, 16: -0.5, 15: -1.0, 31: 2.75})
    assert FORMATS["Q4_1"].dequantize(raw).tolist() == want.tolist()


def test_q5_0_by_hand():
    # d = 0x4000 = 2; bits 0 and 17 of qh set. Codes: value 0: 1 + 16, 16: 2, 1: 3, 17: 4 + 16, others 0
    raw = block(d=[0x00, 0x40], qh=[0x01, 0x00, 0x02, 0x00], qs=(16, {0: 0x21, 1: 0x43}))
    want = expect(32, 2.0 * (0 - 16), {0: 2.0 * (17 - 16), 16: 2.0 * (2 - 16), 1: 2.0 * (3 - 16), 17: 2.0 * (20 - 16)})
    assert FORMATS["Q5_0"].dequantize(raw).tolist() == want.tolist()


def test_q5_1_by_hand():
    # d = 0x3800 = 0.5, m = 0x3C00 = 1; codes as above: 0.5 * q + 1
    raw = block(d=[0x00, 0x38], m=[0x00, 0x3C], qh=[0x01, 0x00, 0x02, 0x00], qs=(16, {0: 0x21, 1: 0x43}))
    want = expect(32, 1.0, {0: 9.5, 16: 2.0, 1: 2.5, 17: 11.0})
    assert FORMATS["Q5_1"].dequantize(raw).tolist() == want.tolist()


def test_q8_0_by_hand():
    # d = 0x3000 = 0.125; codes 1, -1, 127, -128
    raw = block(d=[0x00, 0x30], qs=(32, {0: 0x01, 1: 0xFF, 2: 0x7F, 31: 0x80}))
    want = expect(32, 0.0, {0: 0.125, 1: -0.125, 2: 15.875, 31: -16.0})
    assert FORMATS["Q8_0"].dequantize(raw).tolist() == want.tolist()


def _row(*values: float) -> np.ndarray:
    return np.float32([*values, *[0.0] * (32 - len(values))])


def test_q4_0_ties_go_up():
    # d = -8 / -8 = 1, so the code is floor(x + 8.5): half to even would make 0.5 -> 8, 2.5 -> 10, -1.5 -> 6
    raw = FORMATS["Q4_0"].quantize(_row(-8.0, 0.5, -0.5, 1.5, 2.5, -1.5))
    assert raw[:2].view("<f2")[0] == 1.0
    assert (raw[2:8] & 15).tolist() == [0, 9, 8, 10, 11, 7]


def test_q4_0_takes_the_sign_of_the_widest_value():
    # +8 is the widest: d = 8 / -8 = -1, its code 0; 7 has code -7 + 8 = 1
    raw = FORMATS["Q4_0"].quantize(_row(8.0, 7.0))
    assert raw[:2].view("<f2")[0] == -1.0
    assert (raw[2:4] & 15).tolist() == [0, 1]


def test_q4_1_and_q5_1_ties_go_up():
    # from 0 to 15 in 15 steps, from 0 to 31 in 31: d = 1, m = 0
    q4 = FORMATS["Q4_1"].quantize(_row(15.0, 0.5, 1.5, 2.5))
    assert (q4[4:8] & 15).tolist() == [15, 1, 2, 3]
    q5 = FORMATS["Q5_1"].quantize(_row(31.0, 0.5, 1.5, 18.5))
    assert q5[4] == 0b1001  # the fifth bits of 31 and 19
    assert (q5[8:12] & 15).tolist() == [15, 1, 2, 3]


def test_q8_0_ties_go_away_from_zero():
    raw = FORMATS["Q8_0"].quantize(_row(127.0, 0.5, 1.5, 2.5, -0.5, -1.5))
    assert raw[:2].view("<f2")[0] == 1.0
    assert raw[2:8].view(np.int8).tolist() == [127, 1, 2, 3, -1, -2]


def test_q8_0_just_below_a_tie_stays_below():
    below = np.nextafter(np.float32(0.5), np.float32(0))
    assert FORMATS["Q8_0"].quantize(_row(127.0, below))[3] == 0


@by_name
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused(fmt, bad):
    values = np.zeros((2, 65536), np.float32)  # the second row is in a chunk of its own
    values[1, 3] = bad
    with pytest.raises(RequestError, match=rf"value 65539 is {bad}: {fmt.name} .* finite"):
        fmt.quantize(values)


@by_name
@pytest.mark.parametrize("value", [1e9, -3e38])
def test_a_scale_beyond_f16_is_refused(fmt, value):
    with pytest.raises(RequestError, match=f"{fmt.name}: a block .* beyond the range of f16"):
        fmt.quantize(_row(value, -value))


@by_name
def test_values_too_small_for_a_scale_become_zero(fmt):
    raw = fmt.quantize(_row(1e-44, 3e-45))
    assert fmt.dequantize(raw).tolist() == [0.0] * 32


@by_name
def test_quantizing_what_was_dequantized_changes_nothing_much(fmt):
    values = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    step = {"Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q5_1": 2 / 31, "Q8_0": 1 / 127}[fmt.name]
    blocks = values.reshape(-1, 32)
    error = np.abs(fmt.dequantize(fmt.quantize(values)).reshape(-1, 32) - blocks)
    # half a step, or a whole one at the end that the symmetric codes cannot reach; plus the scale's rounding
    assert (error <= np.abs(blocks).max(axis=-1, keepdims=True) * (step * 1.01 + 2**-10)).all()
