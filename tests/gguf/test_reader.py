"""What a good file reads as."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from gguf_bytes import (
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    kv,
    model,
    number,
    string,
    tensor,
)

from minfer.errors import ModelFileError, RequestError
from minfer.gguf import StringArray, ValueType, open_model
from minfer.quants import FORMATS


@pytest.fixture
def opened(tmp_path):
    """A function from a file's bytes to the open model."""

    def open_bytes(raw: bytes):
        path = tmp_path / "m.gguf"
        path.write_bytes(raw)
        return open_model(path)

    return open_bytes


@pytest.mark.parametrize("version", [2, 3])
def test_an_empty_model(opened, version):
    m = opened(model(version=version))
    assert (m.version, m.alignment, dict(m.metadata), dict(m.tensors)) == (version, 32, {}, {})
    assert m.parts == (m.path,)


SCALARS = [
    (U8, 200), (I8, -100), (U16, 60000), (I16, -30000), (U32, 4_000_000_000), (I32, -2_000_000_000),
    (U64, (1 << 64) - 1), (I64, -(1 << 63)), (F32, 0.5), (F64, 0.1), (BOOL, True), (BOOL, False),
]  # fmt: skip


def test_scalars_are_python_scalars(opened):
    m = opened(model([number(b"k%d" % i, kind, value) for i, (kind, value) in enumerate(SCALARS)]))
    for i, (kind, value) in enumerate(SCALARS):
        assert m.metadata[f"k{i}"] == value
        assert type(m.metadata[f"k{i}"]) is type(value)
        assert m.value_types[f"k{i}"] is ValueType(kind)


def test_a_float_of_single_precision_keeps_its_value(opened):
    m = opened(model([number(b"eps", F32, 1e-5), number(b"nan", F32, math.nan)]))
    assert m.metadata["eps"] == struct.unpack("<f", struct.pack("<f", 1e-5))[0]
    assert math.isnan(m.metadata["nan"])


def test_strings_are_text_or_else_bytes(opened):
    m = opened(model([kv(b"a", STRING, string("žluťoučký".encode())), kv(b"b", STRING, string(b"\xff\x00"))]))
    assert m.metadata == {"a": "žluťoučký", "b": b"\xff\x00"}


def test_the_empty_string(opened):
    assert opened(model([kv(b"a", STRING, string(b""))])).metadata["a"] == ""


@pytest.mark.parametrize(
    ("kind", "code", "values"),
    [
        (U8, "u1", [0, 255]),
        (I16, "<i2", [-5, 7, 9]),
        (I32, "<i4", [-1, 1 << 30]),
        (U64, "<u8", [(1 << 64) - 1]),
        (F32, "<f4", [0.5, -1.0]),
        (F64, "<f8", [0.1]),
        (BOOL, "?", [True, False, True]),
        (I32, "<i4", []),
    ],
)
def test_arrays_are_read_only_numpy(opened, kind, code, values):
    raw = np.array(values, code)
    m = opened(model([array(b"odd", U8, 1, b"\x01"), array(b"k", kind, len(values), raw.tobytes())]))
    got = m.metadata["k"]
    assert not np.shares_memory(got, m.buffer(0))
    assert got.flags.aligned  # although the file's bytes are not
    m.close()
    assert got.dtype == np.dtype(code)
    assert got.tolist() == values
    assert not got.flags.writeable
    assert m.value_types["k"] is ValueType(kind)


def test_string_arrays_keep_every_byte(opened):
    tokens = [b"a", b"", b"\xff\xfe", "Ġthe".encode(), b"\x00"]
    m = opened(model([array(b"t", STRING, len(tokens), b"".join(map(string, tokens))), number(b"after", U8, 7)]))
    m.close()
    got = m.metadata["t"]
    assert isinstance(got, StringArray)
    assert list(got) == tokens
    assert got == tokens
    assert got == StringArray.of(tokens)
    assert got != tokens[:-1]
    assert (got[2], got[-1], list(got[1:3]), len(got)) == (b"\xff\xfe", b"\x00", tokens[1:3], 5)
    assert b"\xff\xfe" in got
    with pytest.raises(IndexError):
        got[5]
    assert m.metadata["after"] == 7


def test_the_empty_string_array(opened):
    m = opened(model([array(b"t", STRING, 0, b"")]))
    assert isinstance(m.metadata["t"], StringArray)
    assert list(m.metadata["t"]) == list(StringArray.of([])) == []


def test_the_mappings_cannot_be_changed(opened):
    m = opened(model([number(b"k", U8, 1)]))
    with pytest.raises(TypeError):
        m.metadata["k"] = 2
    with pytest.raises(TypeError):
        m.tensors["k"] = 2


def test_tensors_lie_where_the_file_says(opened):
    # in the file: b, then a, whose data comes first; a gap between; 256 wide so that rows are whole Q4_K blocks
    q4 = bytes(range(144)) * 6
    f32 = np.arange(5, dtype="<f4").tobytes()
    data = f32 + bytes(64 - len(f32)) + q4
    raw = model([], [tensor(b"b", (256, 3, 2), 12, 64), tensor(b"a", (5,), 0, 0)], data)
    m = opened(raw)
    assert list(m.tensors) == ["b", "a"]
    b = m.tensors["b"]
    assert (b.format, b.shape, b.n_elements, b.nbytes, b.part) == (FORMATS["Q4_K"], (256, 3, 2), 1536, 864, 0)
    assert m.data("b").shape == (6, 144)
    assert m.data("b").tobytes() == raw[b.offset : b.offset + b.nbytes] == q4
    assert m.data("a").view("<f4").tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("dims", [(), (1,), (1, 1, 1, 1)])
def test_scalar_tensors(opened, dims):
    m = opened(model([], [tensor(b"s", dims)], struct.pack("<f", 2.5)))
    assert m.tensors["s"].shape == dims
    assert m.tensors["s"].n_elements == 1
    assert m.data("s").view("<f4").tolist() == [[2.5]]


def test_tensors_that_nothing_computes_with_can_lie_in_a_file(opened):
    # I64 (27), IQ2_XXS (16: 66 bytes for 256 values)
    m = opened(model([], [tensor(b"i", (2,), 27), tensor(b"q", (256,), 16, 32)], bytes(32 + 66)))
    assert [(t.format.name, t.format.computes, t.nbytes) for t in m.tensors.values()] == [
        ("I64", False, 16),
        ("IQ2_XXS", False, 66),
    ]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_alignment(opened, alignment):
    raw = model(
        [number(b"general.alignment", U32, alignment)],
        [tensor(b"a", (2,)), tensor(b"b", (2,), 0, alignment)],
        struct.pack("<2f", 1, 2) + bytes(alignment - 8) + struct.pack("<2f", 3, 4),
        alignment=alignment,
    )
    m = opened(raw)
    assert m.alignment == alignment
    assert m.tensors["a"].offset % alignment == 0
    assert m.data("b").view("<f4").tolist() == [[3, 4]]


def test_padding_after_the_last_tensor_may_be_there_or_not(opened):
    assert len(opened(model([], [tensor()], bytes(16))).tensors) == 1
    assert len(opened(model([], [tensor()], bytes(64))).tensors) == 1


def test_data_is_a_read_only_view_of_the_mapping(opened):
    m = opened(model([], [tensor(b"a", (8, 2))], bytes(64)))
    view, whole = m.data("a"), m.buffer(0)
    assert np.shares_memory(view, whole)
    assert whole.ctypes.data + m.tensors["a"].offset == view.ctypes.data
    assert len(whole) == m.path.stat().st_size
    for a in (view, whole):
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 1


def test_arrays_outlive_the_model(opened):
    m = opened(model([], [tensor(b"a", (2,))], struct.pack("<2f", 1, 2)))
    view = m.data("a")
    m.close()
    m.close()
    assert view.view("<f4").tolist() == [[1, 2]]
    with pytest.raises(RequestError, match="is closed"):
        m.data("a")


def test_it_is_a_context_manager(opened):
    with opened(model([], [tensor()], bytes(16))) as m:
        assert m.data("a").shape == (1, 16)
    with pytest.raises(RequestError, match="is closed"):
        m.buffer(0)


def test_a_tensor_that_is_not_there_is_named(opened):
    with pytest.raises(ModelFileError, match=r"m\.gguf: no tensor 'output\.weight' among its 1 tensors"):
        opened(model([], [tensor()], bytes(16))).data("output.weight")


def test_a_path_may_be_a_string(opened):
    path = str(opened(model()).path)
    assert str(open_model(path).path) == path


def test_names_may_be_any_text(opened):
    name = "вес." + "x" * 300
    m = opened(model([number("ключ".encode(), U8, 1)], [tensor(name.encode())], bytes(16)))
    assert list(m.metadata) == ["ключ"]
    assert list(m.tensors) == [name]
