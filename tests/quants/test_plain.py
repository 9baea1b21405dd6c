"""F32, F16, BF16."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import check_dequantize, check_quantize

from minfer.errors import RequestError
from minfer.quants import FORMATS

F32, F16, BF16 = FORMATS["F32"], FORMATS["F16"], FORMATS["BF16"]


@pytest.mark.parametrize("fmt", [F32, F16, BF16], ids=lambda f: f.name)
def test_equal_to_the_gguf_package(fmt):
    check_dequantize(fmt)
    check_quantize(fmt)


def test_f32_by_hand():
    # 0x3F800000: exponent 127 -> 2^0, mantissa 1.0;  0xC0200000: -, exponent 128 -> 2^1, mantissa 1.25
    raw = np.array([0x00, 0x00, 0x80, 0x3F, 0x00, 0x00, 0x20, 0xC0], np.uint8)
    assert F32.dequantize(raw).tolist() == [1.0, -2.5]
    assert F32.quantize(np.float32([1.0, -2.5])).tolist() == raw.tolist()


def test_f16_by_hand():
    # 0xC100: -, exponent 16 -> 2^1, 1.25;  0x7BFF: 2^15 * (2 - 2^-10);  0x0001: 2^-24, the smallest subnormal
    raw = np.array([0x00, 0xC1, 0xFF, 0x7B, 0x01, 0x00], np.uint8)
    assert F16.dequantize(raw).tolist() == [-2.5, 65504.0, 2.0**-24]
    assert F16.quantize(np.float32([-2.5, 65504.0, 2.0**-24])).tolist() == raw.tolist()


def test_f16_rounds_ties_to_even():
    # the step at 1.0 is 2^-10: one and a half steps lie between codes 1 and 2, half a step between 0 and 1
    values = np.float32([1 + 0.5 / 1024, 1 + 1.5 / 1024])
    assert F16.quantize(values).view("<u2").tolist() == [0x3C00, 0x3C02]


def test_bf16_by_hand():
    # 0x3FC0 is the top of 0x3FC00000: 2^0 * 1.5;  0xC049: -, 2^1 * (1 + 0x49 / 128) = -2 * 1.5703125
    raw = np.array([0xC0, 0x3F, 0x49, 0xC0], np.uint8)
    assert BF16.dequantize(raw).tolist() == [1.5, -3.140625]
    # 1 + 2^-8 is half a step above 1 (even code 0x3F80); 1 + 3 * 2^-8 half a step above the odd code 0x3F81
    assert BF16.quantize(np.float32([1 + 2**-8, 1 + 3 * 2**-8])).view("<u2").tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize("fmt", [F32, F16, BF16], ids=lambda f: f.name)
def test_nan_and_inf_are_kept(fmt):
    back = fmt.dequantize(fmt.quantize(np.float32([np.inf, -np.inf, np.nan])))
    assert back[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(back[2])


def test_a_bf16_nan_does_not_become_inf():
    low_payload = np.array([0x7F800001], np.uint32).view(np.float32)  # its upper half alone would be Inf
    assert BF16.quantize(low_payload).view("<u2").tolist() == [0x7FC0]


@pytest.mark.parametrize(("fmt", "value"), [(F16, 65520.0), (F16, -1e6), (BF16, 3.4e38)])
def test_finite_values_do_not_become_inf(fmt, value):
    with pytest.raises(RequestError, match=f"{fmt.name}: a value of .* beyond the range"):
        fmt.quantize(np.float32([1.0, value]))


def test_the_largest_values_that_round_down():
    assert F16.dequantize(F16.quantize(np.float32([65519.0]))).tolist() == [65504.0]
    top = np.array([0x7F7F7FFF], np.uint32).view(np.float32)
    assert BF16.quantize(top).view("<u2").tolist() == [0x7F7F]
