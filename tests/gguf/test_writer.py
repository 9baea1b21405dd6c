"""What the writer writes, read back by minfer and by the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import F32, I32, STRING, U32, array, kv, model, number, string, tensor

import gguf
from minfer.errors import RequestError
from minfer.gguf import StringArray, Tensor, ValueType, open_model, typed, write_model
from minfer.quants import FORMATS

DATA = Path(__file__).parent.parent / "data"

METADATA = {
    "general.architecture": "llama",
    "a.uint": 7,
    "a.negative": -7,
    "a.wide": 1 << 40,
    "a.wide_negative": -(1 << 40),
    "a.float": 1e-5,
    "a.double": np.float64(0.1),
    "a.bool": True,
    "a.byte": np.uint8(200),
    "a.short": np.int16(-300),
    "a.bytes": b"\xff\xfe",
    "l.ints": [1, -2, 3],
    "l.wide": [1 << 40],
    "l.floats": [0.5, 2],
    "l.bools": [True, False],
    "l.strings": ["a", b"\xff", "é"],
    "l.array": np.array([1, 2], np.uint16),
    "l.empty": [],
    "l.none": np.array([], np.float32),
}
TYPES = "STRING UINT32 INT32 UINT64 INT64 FLOAT32 FLOAT64 BOOL UINT8 INT16 STRING"
ELEMENT_TYPES = "INT32 INT64 FLOAT32 BOOL STRING UINT16 STRING FLOAT32"


def rows(seed=0, shape=(3, 512)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def some_tensors():
    out = [Tensor.of(f"t.{f.name}", rows(i), f) for i, f in enumerate(FORMATS.values()) if f.quantizes]
    raw = np.random.default_rng(9).integers(0, 256, (2, FORMATS["Q6_K"].row_bytes(256)), np.uint8)
    out.append(Tensor("t.raw", FORMATS["Q6_K"], (256, 1, 2), raw))
    out.append(Tensor.of("t.scalar", np.float32(1.5).reshape(())))
    return out


def test_bytes_by_hand(tmp_path):
    path = tmp_path / "m.gguf"
    weights = np.float32([[1, 2], [3, 4], [5, 6]])  # three rows of two
    metadata = {"k": 7, "s": "ab", "l": ["x", ""], "i": [1, 2], "f": 0.5}
    assert write_model(path, metadata, [Tensor.of("w", weights), Tensor.of("v", weights[0])]) == [path]
    expected = model(
        [
            number(b"k", U32, 7),
            kv(b"s", STRING, string(b"ab")),
            array(b"l", STRING, 2, string(b"x") + string(b"")),
            array(b"i", I32, 2, b"\1\0\0\0\2\0\0\0"),
            number(b"f", F32, 0.5),
        ],
        [tensor(b"w", (2, 3)), tensor(b"v", (2,), 0, 32)],
        weights.tobytes().ljust(32, b"\0") + weights[0].tobytes().ljust(32, b"\0"),
    )
    assert path.read_bytes() == expected


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 1024])
def test_round_trip(tmp_path, version, alignment):
    path = tmp_path / "m.gguf"
    tensors = some_tensors()
    write_model(path, METADATA, tensors, version=version, alignment=alignment)
    with open_model(path) as m:
        assert (m.version, m.alignment) == (version, alignment)
        assert m.metadata["a.float"] == np.float32(1e-5)
        assert m.metadata["a.double"] == 0.1
        for key in ("general.architecture", "a.uint", "a.negative", "a.wide", "a.wide_negative", "a.bool", "a.bytes"):
            assert m.metadata[key] == METADATA[key]
        assert list(m.metadata["l.strings"]) == [b"a", b"\xff", "é".encode()]
        for key in ("l.ints", "l.wide", "l.floats", "l.bools", "l.array", "l.none"):
            assert m.metadata[key].tolist() == list(METADATA[key])
        assert m.metadata["l.empty"] == []
        kinds = [m.value_types[k].name for k in METADATA]
        assert " ".join(kinds) == f"{TYPES} {ELEMENT_TYPES}"
        assert list(m.tensors) == [t.name for t in tensors]
        for t in tensors:
            assert (m.tensors[t.name].format, m.tensors[t.name].shape) == (t.format, t.shape)
            assert m.data(t.name).tobytes() == t.data.tobytes()


def test_the_gguf_package_reads_it(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = some_tensors()
    metadata = {k: v for k, v in METADATA.items() if k != "a.bytes"}  # it wants every scalar string to be UTF-8
    write_model(path, metadata, tensors, alignment=64)
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        field = reader.fields[key]
        if key == "l.strings":
            assert [bytes(field.parts[i]) for i in field.data] == [b"a", b"\xff", "é".encode()]
        elif isinstance(value, list | np.ndarray):
            assert list(field.contents() or []) == list(value)
        else:
            assert field.contents() == (np.float32(value) if type(value) is float else value)
    assert [t.name for t in reader.tensors] == [t.name for t in tensors]
    for t, theirs in zip(tensors, reader.tensors, strict=True):
        assert theirs.tensor_type.name == t.format.name
        assert tuple(theirs.shape.tolist()) == t.shape
        assert theirs.data.tobytes() == t.data.tobytes()


def test_what_the_gguf_package_writes_reads_the_same(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", b"\xff"])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_tensor("w", rows())
    writer.add_tensor(
        "q", gguf.quantize(rows(), gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(path) as m:
        assert m.metadata["general.architecture"] == "llama"
        assert m.metadata["llama.block_count"] == 3
        assert m.metadata["tokenizer.ggml.tokens"] == [b"a", b"\xff"]
        assert m.metadata["floats"].tolist() == [0.5, 1.5]
        assert m.tensors["q"].shape == (512, 3)
        np.testing.assert_array_equal(m.data("w").view("<f4"), rows())
        assert m.data("q").tobytes() == FORMATS["Q4_1"].quantize(rows()).tobytes()


@pytest.mark.parametrize("name", ["header-llama-spm.gguf", "header-smollm2.gguf"])
def test_a_real_file_copies_to_the_same_bytes(tmp_path, name):
    with open_model(DATA / name) as m:
        metadata = {key: typed(value, m.value_types[key]) for key, value in m.metadata.items()}
        write_model(
            tmp_path / "copy.gguf", metadata, [Tensor(n, t.format, t.shape, m.data(n)) for n, t in m.tensors.items()]
        )
    assert (tmp_path / "copy.gguf").read_bytes() == (DATA / name).read_bytes()


def test_typed_gives_the_type_back():
    assert typed(3, ValueType.UINT16).dtype == np.uint16
    assert typed(True, ValueType.BOOL).dtype == np.bool_
    assert typed("x", ValueType.STRING) == "x"
    assert typed(b"\xff", ValueType.STRING) == b"\xff"


def test_values_go_in_feature_fastest(tmp_path):
    write_model(tmp_path / "m.gguf", {}, [Tensor.of("w", rows(shape=(2, 3, 64)), FORMATS["Q8_0"])])
    with open_model(tmp_path / "m.gguf") as m:
        assert m.tensors["w"].shape == (64, 3, 2)
        assert m.data("w").shape == (6, 68)


def test_parts(tmp_path):
    tensors = [Tensor.of(f"t{i}", rows(i, (4, 64))) for i in range(5)]  # 1024 bytes each
    written = write_model(tmp_path / "m.gguf", METADATA, tensors, max_part_bytes=2048, alignment=64)
    assert [p.name for p in written] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in written]
    with open_model(written[2]) as m:
        assert [t.part for t in m.tensors.values()] == [0, 0, 1, 1, 2]
        assert m.metadata["a.uint"] == 7
        assert (m.alignment, m.metadata["split.count"], m.metadata["split.tensors.count"]) == (64, 3, 5)
        for i in range(5):
            np.testing.assert_array_equal(m.data(f"t{i}").view("<f4"), rows(i, (4, 64)))
    assert len(gguf.GGUFReader(written[1]).tensors) == 2
    assert open_model(written[1]).value_types["split.no"] is ValueType.UINT16


def test_a_tensor_larger_than_a_part_gets_its_own(tmp_path):
    tensors = [Tensor.of(f"t{i}", rows(i, (4, 64))) for i in range(2)]
    assert len(write_model(tmp_path / "m.gguf", {}, tensors, max_part_bytes=100)) == 2


def test_what_fits_one_part_is_not_split(tmp_path):
    written = write_model(tmp_path / "m.gguf", {}, [Tensor.of("t", rows())], max_part_bytes=1 << 20)
    assert written == [tmp_path / "m.gguf"]
    assert "split.count" not in open_model(written[0]).metadata


def test_data_may_be_made_late(tmp_path):
    calls = []

    def late(i):
        calls.append(i)
        return FORMATS["F16"].quantize(rows(i))

    tensors = [Tensor(f"t{i}", FORMATS["F16"], (512, 3), lambda i=i: late(i)) for i in range(2)]
    write_model(tmp_path / "m.gguf", {}, tensors)
    assert calls == [0, 1]
    with open_model(tmp_path / "m.gguf") as m:
        assert m.data("t1").tobytes() == FORMATS["F16"].quantize(rows(1)).tobytes()


def test_wrong_sizes_are_refused_before_any_work(tmp_path):
    tensors = [
        Tensor("late", FORMATS["F32"], (1,), lambda: pytest.fail("made, although the model is refused")),
        Tensor("w", FORMATS["F32"], (2,), np.zeros(4, np.uint8)),
    ]
    with pytest.raises(RequestError, match=r"tensor 'w' .*found 4 bytes"):
        write_model(tmp_path / "m.gguf", {}, tensors)
    tensors = [Tensor("late", FORMATS["F32"], (1,), lambda: np.zeros(8, np.uint8))]
    with pytest.raises(RequestError, match=r"tensor 'late' .*found 8 bytes"):
        write_model(tmp_path / "m.gguf", {}, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def fail():
        raise ZeroDivisionError

    tensors = [Tensor.of("a", rows()), Tensor("b", FORMATS["F32"], (4,), fail)]
    for max_part_bytes in (None, 64):
        with pytest.raises(ZeroDivisionError):
            write_model(path, {}, tensors, max_part_bytes=max_part_bytes)
        assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
        assert path.read_bytes() == b"old"


def test_a_model_that_is_open_can_be_replaced(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, {}, [Tensor.of("w", rows(1))])
    with open_model(path) as m:
        write_model(path, {}, [Tensor("w", m.tensors["w"].format, m.tensors["w"].shape, m.data("w"))])
        write_model(path, {}, [Tensor.of("w", rows(2))])
        np.testing.assert_array_equal(m.data("w").view("<f4"), rows(1))  # still the file that was opened
    with open_model(path) as m:
        np.testing.assert_array_equal(m.data("w").view("<f4"), rows(2))


W = Tensor.of("w", np.zeros((1, 4), np.float32))


@pytest.mark.parametrize(
    ("metadata", "tensors", "options", "message"),
    [
        ({"": 1}, [], {}, "metadata key '' has 0 bytes"),
        ({"k": None}, [], {}, "'k': cannot write a NoneType"),
        ({"k": {}}, [], {}, "'k': cannot write a dict"),
        ({"k": 1 << 64}, [], {}, "'k': integer .* does not fit 64 bits"),
        ({"k": [1 << 64]}, [], {}, "'k': an integer beyond 64 bits"),
        ({"k": 1e39}, [], {}, "'k': 1e.39 does not fit FLOAT32"),
        ({"k": [1e39]}, [], {}, "'k': .* does not fit FLOAT32"),
        ({"k": ["a", 1]}, [], {}, "'k': a sequence of int, str"),
        ({"k": [[1], [2]]}, [], {}, "'k': a sequence of list"),
        ({"k": np.zeros((2, 2))}, [], {}, r"'k': cannot write float64 of shape \(2, 2\)"),
        ({"k": np.float16(1)}, [], {}, "'k': cannot write float16"),
        ({"k": np.array(["a"])}, [], {}, "'k': cannot write <U1"),
        ({"split.count": 3}, [], {}, "'split.count' is written for split files"),
        ({"general.alignment": 64}, [], {}, "'general.alignment' differs"),
        ({}, [], {"version": 1}, "version 1, expected 2 or 3"),
        ({}, [], {"alignment": 13}, "alignment 13, expected a power of two"),
        ({}, [], {"alignment": 0}, "alignment 0, expected a power of two"),
        ({}, [W, W], {}, "tensor 'w' is given twice"),
        ({}, [Tensor("", FORMATS["F32"], (1,), np.zeros(4, np.uint8))], {}, "tensor name '' has 0 bytes"),
        ({}, [Tensor("w", FORMATS["F32"], (1,) * 5, np.zeros(4, np.uint8))], {}, "expected up to 4 positive"),
        ({}, [Tensor("w", FORMATS["F32"], (0,), np.zeros(0, np.uint8))], {}, "expected up to 4 positive"),
        ({}, [Tensor("w", FORMATS["F32"], (2,), np.zeros(4, np.uint8))], {}, "found 4 bytes of uint8, expected 8"),
        ({}, [Tensor("w", FORMATS["F32"], (1,), np.zeros(1, np.float32))], {}, "of float32, expected 4 of uint8"),
        ({}, [Tensor("w", FORMATS["Q4_0"], (31,), np.zeros(18, np.uint8))], {}, "row of 31 values"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(tmp_path, metadata, tensors, options, message):
    with pytest.raises(RequestError, match=message):
        write_model(tmp_path / "m.gguf", metadata, tensors, **options)
    assert list(tmp_path.iterdir()) == []


def test_string_arrays_are_written_as_they_are(tmp_path):
    tokens = StringArray.of([b"a", b"\xff", b""])
    write_model(tmp_path / "m.gguf", {"t": tokens, "u": tokens[1:]}, [])
    m = open_model(tmp_path / "m.gguf")
    assert m.metadata["t"] == tokens
    assert m.metadata["u"] == [b"\xff", b""]
