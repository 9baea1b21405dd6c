"""Models in parts."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf_bytes import I32, STRING, U16, U32, kv, model, number, string, tensor

from minfer.errors import ModelFileError
from minfer.gguf import open_model


def part(no, count, names, *, total=3, extra=(), kind=U16):
    entries = [number(b"split.no", kind, no), number(b"split.count", kind, count)]
    entries += [number(b"split.tensors.count", I32, total), *extra]
    data = b"".join(struct.pack("<f", name[0]).ljust(32, b"\0") for name in names)
    return model(entries, [tensor(name, (1,), 0, 32 * i) for i, name in enumerate(names)], data)


ARCH = kv(b"general.architecture", STRING, string(b"llama"))


@pytest.fixture
def paths(tmp_path):
    """A good model: tensors a and b in the first part, none in the second, c in the third."""
    paths = [tmp_path / f"m-q4-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for no, (path, names) in enumerate(zip(paths, [[b"a", b"b"], [], [b"c"]], strict=True)):
        path.write_bytes(part(no, 3, names, extra=[ARCH] if no == 0 else []))
    return paths


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_any_part_opens_the_model(paths, asked):
    with open_model(paths[asked]) as m:
        assert m.path == paths[asked]
        assert m.parts == tuple(paths)
        assert m.metadata["general.architecture"] == "llama"
        assert m.metadata["split.no"] == 0
        assert {n: t.part for n, t in m.tensors.items()} == {"a": 0, "b": 0, "c": 2}
        for name in "abc":
            assert m.data(name).view("<f4").item() == ord(name)
            t = m.tensors[name]
            assert np.shares_memory(m.buffer(t.part)[t.offset : t.offset + t.nbytes], m.data(name))


def test_part_numbers_may_have_any_integer_type(paths):
    paths[1].write_bytes(part(1, 3, [], kind=U32))
    assert len(open_model(paths[0]).tensors) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_one_part_is_a_whole_model_of_any_name(tmp_path, count):
    (tmp_path / "m.gguf").write_bytes(part(0, count, [b"a"], total=1))
    assert open_model(tmp_path / "m.gguf").parts == (tmp_path / "m.gguf",)


@pytest.mark.parametrize(("asked", "lost"), [(0, 1), (2, 0), (1, 2)])
def test_a_missing_part_is_named(paths, asked, lost):
    paths[lost].unlink()
    with pytest.raises(ModelFileError, match=rf"m-q4-0000{lost + 1}-of-00003\.gguf: part {lost + 1} of 3 is missing"):
        open_model(paths[asked])


@pytest.mark.parametrize("name", ["m.gguf", "m-q4-00001-of-00003.gguf", "m-00002-of-00004.gguf", "m-2-of-3.gguf"])
def test_a_name_that_disagrees(tmp_path, name):
    (tmp_path / name).write_bytes(part(1, 3, []))
    with pytest.raises(ModelFileError, match=r"part 2 of 3 \(split.no = 1, counted from 0\).*-00002-of-00003\.gguf'"):
        open_model(tmp_path / name)


def test_a_part_that_is_no_part(paths):
    paths[2].write_bytes(model([ARCH]))
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: metadata key 'split.no': found nothing"):
        open_model(paths[0])


def test_counts_that_disagree(paths):
    paths[2].write_bytes(part(2, 4, [b"c"]))
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: .*'split.count': found 4, expected 3"):
        open_model(paths[0])


def test_numbers_that_disagree(paths):
    paths[2].write_bytes(part(1, 3, [b"c"]))
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: .*'split.no': found 1, expected 2"):
        open_model(paths[0])


def test_a_tensor_in_two_parts(paths):
    paths[2].write_bytes(part(2, 3, [b"b"]))
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: tensor 'b' is also in m-q4-00001-of-00003.gguf"):
        open_model(paths[1])


def test_too_few_tensors(paths):
    paths[2].write_bytes(part(2, 3, []))
    with pytest.raises(ModelFileError, match=r"'split.tensors.count': the 3 parts hold 2 tensors, expected 3"):
        open_model(paths[0])


def test_tensor_counts_that_disagree(paths):
    paths[1].write_bytes(part(1, 3, [], total=9))
    with pytest.raises(ModelFileError, match=r"00002-of-00003.gguf: .*'split.tensors.count' differs"):
        open_model(paths[0])


def test_a_part_of_another_model(paths):
    paths[2].write_bytes(part(2, 3, [b"c"], extra=[kv(b"general.architecture", STRING, string(b"qwen2"))]))
    with pytest.raises(ModelFileError, match=r"00003.*'general.architecture' differs from that of m-q4-00001-of-00003"):
        open_model(paths[0])


def test_a_part_that_repeats_the_metadata_is_fine(paths):
    paths[2].write_bytes(part(2, 3, [b"c"], extra=[ARCH]))
    assert len(open_model(paths[0]).tensors) == 3


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([kv(b"split.count", STRING, string(b"3"))], r"'split.count': found '3', expected an integer from 0 to 99999"),
        ([number(b"split.count", I32, -1)], r"'split.count': found '-1', expected"),
        ([number(b"split.count", U32, 100_000)], r"'split.count': found '100000'"),
        ([number(b"split.count", U32, 3)], r"'split.no': found nothing, expected an integer from 0 to 2"),
        ([number(b"split.count", U32, 3), number(b"split.no", U32, 3)], r"'split.no': found '3', expected an integer"),
    ],
)
def test_split_metadata_that_makes_no_sense(tmp_path, entries, message):
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(model(entries))
    with pytest.raises(ModelFileError, match=message):
        open_model(tmp_path / "m-00001-of-00003.gguf")


def test_a_damaged_part_is_named(paths):
    paths[2].write_bytes(paths[2].read_bytes()[:-30])
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: tensor 'c', .*its 4 bytes"):
        open_model(paths[0])
