"""The table of formats, and what all formats share."""

from __future__ import annotations

import numpy as np
import pytest

import gguf
from minfer.errors import ModelFileError, RequestError, UnsupportedError
from minfer.quants import FORMATS, KNOWN, by_id, known_by_id

by_name = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def test_the_formats():
    assert " ".join(FORMATS) == "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
    assert " ".join(f.name for f in FORMATS.values() if f.quantizes) == "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0"
    assert all(by_id(f.id) is f for f in FORMATS.values())


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda k: k.name)
def test_numbers_names_and_sizes_are_those_of_the_gguf_package(kind):
    fmt = known_by_id(int(kind))
    size = gguf.GGML_QUANT_SIZES[kind]
    if kind.name == "Q8_1":
        size = (32, 36)  # two f16 in ggml since 2024; the package still counts two f32
    assert (fmt.name, fmt.block_size, fmt.block_bytes) == (kind.name, *size)


@pytest.mark.parametrize(
    ("number", "name"),
    [(4, "Q4_2"), (5, "Q4_3"), (31, "Q4_0_4_4"), (32, "Q4_0_4_8"), (33, "Q4_0_8_8"), (36, "IQ4_NL_4_4")],
)
def test_removed_types_are_named(number, name):
    for lookup in (by_id, known_by_id):
        with pytest.raises(ModelFileError, match=rf"type {number} is {name}, which ggml has removed"):
            lookup(number)


@pytest.mark.parametrize("number", [99, -1, 1 << 32])
def test_unknown_numbers_are_refused(number):
    for lookup in (by_id, known_by_id):
        with pytest.raises(ModelFileError, match=f"unknown tensor type {number}"):
            lookup(number)


@pytest.mark.parametrize("fmt", [f for f in KNOWN.values() if not f.computes], ids=lambda f: f.name)
def test_size_only_types_are_named(fmt):
    with pytest.raises(UnsupportedError, match=rf"{fmt.name} .*not supported; supported are F32, "):
        by_id(fmt.id)
    with pytest.raises(UnsupportedError, match=f"compute with {fmt.name}"):
        fmt.dequantize(np.zeros(fmt.block_bytes, np.uint8))


def test_row_bytes():
    assert FORMATS["Q4_K"].row_bytes(512) == 288
    assert FORMATS["Q4_0"].row_bytes(0) == 0
    with pytest.raises(RequestError, match=r"row of 576 values is not a whole number of Q4_K blocks: .* 256"):
        FORMATS["Q4_K"].row_bytes(576)
    with pytest.raises(RequestError, match="-32"):
        FORMATS["Q4_0"].row_bytes(-32)


def test_formats_that_do_not_quantize_say_so():
    with pytest.raises(UnsupportedError, match="does not quantize to Q4_K"):
        FORMATS["Q4_K"].quantize(np.zeros(256, np.float32))


@by_name
def test_rows_of_any_rank_and_stride(fmt):
    raw = np.random.default_rng(3).integers(0, 256, (4, 3, 2 * fmt.block_bytes), dtype=np.uint8)
    rows = fmt.dequantize(raw)
    assert rows.shape == (4, 3, 2 * fmt.block_size)
    assert rows.flags.writeable
    np.testing.assert_array_equal(fmt.dequantize(raw[::2, 1:]), rows[::2, 1:])
    np.testing.assert_array_equal(fmt.dequantize(raw[1, 2]), rows[1, 2])
    assert fmt.dequantize(raw[:0]).shape == (0, 3, 2 * fmt.block_size)


@by_name
def test_read_only_unaligned_bytes(fmt):
    raw = np.random.default_rng(4).integers(0, 256, 3 * fmt.block_bytes + 1, dtype=np.uint8)
    view = np.frombuffer(raw.tobytes(), np.uint8)[1:]
    np.testing.assert_array_equal(fmt.dequantize(view), fmt.dequantize(raw[1:].copy()))


@by_name
def test_wrong_arrays_are_refused(fmt):
    with pytest.raises(RequestError, match="uint8"):
        fmt.dequantize(np.zeros(fmt.block_bytes, np.int8))
    if fmt.block_bytes > 1:
        with pytest.raises(RequestError, match=f"row of {fmt.block_bytes + 1} bytes .*multiple of {fmt.block_bytes}"):
            fmt.dequantize(np.zeros(fmt.block_bytes + 1, np.uint8))
    if fmt.quantizes:
        with pytest.raises(RequestError, match="float32"):
            fmt.quantize(np.zeros(fmt.block_size))
    if fmt.quantizes and fmt.block_size > 1:
        with pytest.raises(RequestError, match="whole number"):
            fmt.quantize(np.zeros(fmt.block_size + 1, np.float32))
