"""KV row formats."""

from __future__ import annotations

import numpy as np
import pytest

from minfer.errors import NumericsError, RequestError
from minfer.quants import FORMATS
from minfer.quants.kv import KV_FORMATS, kv_format

by_name = pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=lambda f: f.name)


def test_the_names():
    assert list(KV_FORMATS) == ["f32", "f16", "q8_0"]


@pytest.mark.parametrize("name", ["F16", " f16", "q4_0", "q8", ""])
def test_names_are_parsed_strictly(name):
    with pytest.raises(RequestError, match="expected one of f32, f16, q8_0"):
        kv_format(name)


@pytest.mark.parametrize(
    ("name", "n", "expected"),
    [
        ("f32", 3, 12),
        ("f16", 64, 128),
        ("f16", 3, 8),  # 6, padded
        ("q8_0", 32, 36),  # 34, padded
        ("q8_0", 64, 68),  # 2 * 34 is whole
        ("q8_0", 192, 204),
        ("q8_0", 1056, 1124),  # 33 * 34 = 1122, padded
    ],
)
def test_row_bytes(name, n, expected):
    assert kv_format(name).row_bytes(n) == expected


def test_q8_0_is_about_3_76_times_smaller_than_f32():
    assert kv_format("f32").row_bytes(1024) / kv_format("q8_0").row_bytes(1024) == pytest.approx(3.76, abs=0.01)


@pytest.mark.parametrize("n", [0, -32, 31, 80])
def test_q8_0_refuses_a_partial_block(n):
    with pytest.raises(RequestError, match=f"row of {n} values cannot be q8_0: expected a positive multiple of 32"):
        kv_format("q8_0").row_bytes(n)


def test_q8_0_by_hand():
    # amax = 127: d = 1 = 0x3C00. Ties go to even: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, -0.5 -> 0, -2.5 -> -2 = 0xFE
    row = np.zeros(32, np.float32)
    row[:6] = [127.0, 0.5, 1.5, 2.5, -0.5, -2.5]
    raw = kv_format("q8_0").pack(row)
    assert raw.tolist() == [0x00, 0x3C, 0x7F, 0x00, 0x02, 0x02, 0x00, 0xFE, *[0] * 26, 0, 0]
    back = kv_format("q8_0").unpack(raw, 32)
    assert back[:6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


def test_q8_0_codes_come_from_the_unrounded_scale():
    # amax = 1: d = 1/127 = 0.0078740157 in float32, 0x2008 = 0.00787353515625 in f16; 1 * 127 -> 127
    row = np.zeros(32, np.float32)
    row[0] = 1.0
    raw = kv_format("q8_0").pack(row)
    assert raw[:3].tolist() == [0x08, 0x20, 0x7F]
    assert kv_format("q8_0").unpack(raw, 32)[0] == np.float32(0.00787353515625 * 127)


def test_q8_0_blocks_lie_one_after_the_other_and_padding_is_zero():
    row = np.repeat(np.float32([127.0, -254.0, 381.0]), 32)
    raw = kv_format("q8_0").pack(row)
    assert len(raw) == 104  # 3 * 34 = 102
    assert raw[34:36].view("<f2")[0] == 2.0
    assert raw[36:68].view(np.int8).tolist() == [-127] * 32
    assert raw[102:].tolist() == [0, 0]


def test_q8_0_blocks_read_as_the_weight_format():
    values = np.random.default_rng(0).standard_normal((5, 7, 96)).astype(np.float32)
    raw = kv_format("q8_0").pack(values)
    assert raw.shape == (5, 7, 104)
    np.testing.assert_array_equal(kv_format("q8_0").unpack(raw, 96), FORMATS["Q8_0"].dequantize(raw[..., :102]))
    error = np.abs(kv_format("q8_0").unpack(raw, 96) - values).reshape(-1, 32)
    amax = np.abs(values).reshape(-1, 32).max(axis=-1, keepdims=True)
    assert (error <= amax * (0.5 / 127 + 2**-11) * 1.0001).all()


def test_f32_and_f16_by_hand():
    row = np.float32([1.0, -2.5, 1 + 0.5 / 1024])
    assert kv_format("f32").pack(row).view("<u4").tolist() == [0x3F800000, 0xC0200000, 0x3F801000]
    assert kv_format("f16").pack(row).view("<u2").tolist() == [0x3C00, 0xC100, 0x3C00, 0]  # a tie, to even; padding
    assert kv_format("f16").unpack(kv_format("f16").pack(row), 3).tolist() == [1.0, -2.5, 1.0]


@by_name
def test_rows_of_any_rank_and_stride(fmt):
    values = np.random.default_rng(0).standard_normal((4, 6, 64)).astype(np.float32)
    strided = values[::2, ::3]
    raw = fmt.pack(strided)
    assert raw.shape == (2, 2, fmt.row_bytes(64))
    wide = np.zeros((2, 2, 2 * fmt.row_bytes(64)), np.uint8)[..., : fmt.row_bytes(64)]
    wide[:] = raw
    np.testing.assert_array_equal(fmt.unpack(wide, 64), fmt.unpack(raw, 64))
    for i in range(2):
        for j in range(2):
            np.testing.assert_array_equal(raw[i, j], fmt.pack(values[2 * i, 3 * j]))
    assert fmt.pack(values[:0]).shape == (0, 6, fmt.row_bytes(64))
    assert fmt.unpack(raw[:0], 64).shape == (0, 2, 64)


@by_name
def test_zeros_and_tiny_values(fmt):
    row = np.zeros(64, np.float32)
    row[40] = 1e-44
    assert np.abs(fmt.unpack(fmt.pack(row), 64)).max() <= 1e-44


@pytest.mark.parametrize(("name", "value"), [("f16", 65520.0), ("f16", -1e9), ("q8_0", 127 * 65520.0), ("q8_0", -1e38)])
def test_finite_values_do_not_become_inf(name, value):
    row = np.zeros(32, np.float32)
    row[3] = value
    with pytest.raises(NumericsError, match=f"KV {name}: .* beyond the range of f16 .* f32"):
        kv_format(name).pack(row)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf(value):
    row = np.zeros(32, np.float32)
    row[3] = value
    for name in ("f32", "f16"):
        np.testing.assert_array_equal(kv_format(name).unpack(kv_format(name).pack(row), 32), row)
    with pytest.raises(NumericsError, match="q8_0: a row holds NaN or Inf"):
        kv_format("q8_0").pack(row)


@by_name
def test_wrong_arrays_are_refused(fmt):
    with pytest.raises(RequestError, match="float32"):
        fmt.pack(np.zeros(32))
    with pytest.raises(RequestError, match="float32"):
        fmt.pack(np.float32(1.0).reshape(()))
    with pytest.raises(RequestError, match=f"rows of {fmt.row_bytes(64)} bytes for 64 values"):
        fmt.unpack(np.zeros(fmt.row_bytes(32), np.uint8), 64)
    with pytest.raises(RequestError, match="uint8"):
        fmt.unpack(np.zeros(fmt.row_bytes(32), np.int8), 32)
