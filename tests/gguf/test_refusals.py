"""What a bad file is refused for, by name, without allocating what it claims."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    LARGEST,
    STRING,
    U8,
    U32,
    U64,
    array,
    kv,
    model,
    number,
    string,
    tensor,
    u32,
    u64,
)

from minfer.errors import ModelFileError
from minfer.gguf import open_model

ALIGN = b"general.alignment"
BF16, Q4_0, Q4_K = 30, 2, 12

CASES = {
    # the first 24 bytes
    "wrong magic": (b"ABCD" + bytes(40), r"magic is b'ABCD', expected b'GGUF'"),
    "old ggml": (b"tjgg" + bytes(40), r"magic is b'tjgg'.*GGJT"),
    "byte-swapped magic": (b"FUGG" + bytes(40), r"byte-swapped"),
    "lfs pointer": (b"version https://git-lfs.example/spec/v1\n", r"Git LFS pointer"),
    "web page": (b"<!DOCTYPE html><html></html>", r"web page"),
    "zip": (b"PK\x03\x04" + bytes(40), r"ZIP"),
    "three bytes": (b"GGU", r"magic is b'GGU'"),
    "only magic": (b"GGUF", r"header needs 24 bytes but the file of 4 bytes has 4 left"),
    "cut in the counts": (model()[:20], r"needs 24 bytes but the file of 20 bytes"),
    "version 0": (model(version=0), r"version 0, expected 2 or 3"),
    "version 1": (model(version=1), r"version 1, expected 2 or 3; convert"),
    "version 4": (model(version=4), r"at byte 4: GGUF version 4, expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"big-endian"),
    "absurd tensor count": (model(n_tensors=LARGEST), rf"at byte 8: {LARGEST} tensors cannot fit in a file of 24"),
    "absurd entry count": (model(n_kv=LARGEST), rf"at byte 16: {LARGEST} metadata entries cannot fit"),
    "a tensor too many": (model([], [tensor()], bytes(16), n_tensors=2), r"tensor 1 of 2, at byte \d+: "),
    "an entry too many": (model([number(b"k", U8, 1)], n_kv=2), r"metadata entry 1 of 2.*needs 8 bytes"),
    # metadata
    "absurd key length": (model([string(b"k", LARGEST) + bytes(20)]), rf"entry 0 of 1.*key needs {LARGEST} bytes"),
    "key length that wraps": (model([string(b"k", LARGEST - 7) + bytes(20)]), r"entry 0 of 1.*the key needs"),
    "empty key": (model([number(b"", U8, 1)]), r"entry 0 of 1, at byte 24: the key has 0 bytes, expected 1 to 65535"),
    "long key": (model([number(b"k" * 65536, U8, 1)]), r"the key has 65536 bytes, expected 1 to 65535"),
    "key not utf-8": (model([number(b"\xff", U8, 1)]), r"key b'\\xff' is not UTF-8"),
    "duplicate key": (model([number(b"k", U8, 1)] * 2), r"metadata key 'k', at byte 38: the key occurs twice"),
    "unknown value type": (model([kv(b"k", 13, bytes(8))]), r"key 'k', at byte 33: unknown value type 13, expected 0"),
    "unknown array type": (model([array(b"k", 99, 1, bytes(8))]), r"'k'.*unknown array element type 99"),
    "nested array": (model([array(b"k", ARRAY, 1, u32(U8) + u64(1) + b"x")]), r"'k'.*array of arrays"),
    "empty nested array": (model([array(b"k", ARRAY, 0, b"")]), r"'k'.*array of arrays"),
    "absurd array length": (model([array(b"k", U8, LARGEST, b"")]), rf"'k'.*array of {LARGEST} UINT8 needs {LARGEST}"),
    "array bytes that wrap": (model([array(b"k", U64, 1 << 61, b"")]), rf"array of {1 << 61} UINT64 needs {1 << 64}"),
    "truncated array": (model([array(b"k", I32, 3, bytes(11))]), r"array of 3 INT32 needs 12 bytes.*11 left"),
    "absurd string length": (model([kv(b"k", STRING, u64(LARGEST))]), rf"'k'.*the value needs {LARGEST} bytes"),
    "truncated string": (model([kv(b"k", STRING, string(b"abc", 4))]), r"value needs 4 bytes.*3 left; it is truncated"),
    "truncated scalar": (model([kv(b"k", U64, bytes(7))]), r"value needs 8 bytes.*7 left"),
    "no value": (model([string(b"k") + u32(U8)], n_kv=1) + b"", r"'k'.*needs 1 bytes"),
    "bool 2": (model([kv(b"k", BOOL, b"\x02")]), r"'k', at byte 37: a bool is 2, expected 0 or 1"),
    "bool array": (model([array(b"k", BOOL, 3, b"\x00\x01\xff")]), r"'k', at byte 51: bool 2 is 255, expected 0 or 1"),
    "strings: absurd count": (model([array(b"k", STRING, LARGEST, b"")]), rf"array of {LARGEST} STRING needs"),
    "strings: absurd length": (
        model([array(b"k", STRING, 2, string(b"ab") + u64(LARGEST))]),
        r"'k', at byte 59: string 1 of 2 runs past the end",
    ),
    "strings: length of 2^63": (
        model([array(b"k", STRING, 3, string(b"ab") + u64(1 << 63) + u64(0))]),
        r"'k', at byte 59: string 1 of 3 runs past the end",
    ),
    "strings: lengths that wrap": (
        model([array(b"k", STRING, 2, u64(LARGEST - 7) + u64(0))]),
        r"'k', at byte 49: string 0 of 2 runs past the end",
    ),
    "strings: cut in a string": (
        model([array(b"k", STRING, 2, string(b"ab") + string(b"cdef", 5))]),
        r"at byte 59: string 1 of 2 runs past the end of the file of 71 bytes",
    ),
    "strings: cut in the middle": (
        model([array(b"k", STRING, 3, string(b"ab") + string(b"cdefghijk", 999) + string(b""))]),
        r"at byte 59: string 1 of 3 runs past the end",
    ),
    "strings: cut in a length": (
        model([array(b"k", STRING, 2, string(b"abcdefgh") + bytes(7))]),
        r"at byte 65: string 1 of 2 runs past the end",
    ),
    # alignment
    "alignment 0": (model([number(ALIGN, U32, 0)]), r"'general.alignment'.*found 0, expected a power of two"),
    "alignment 13": (model([number(ALIGN, U32, 13)]), r"'general.alignment'.*found 13, expected a power of two"),
    "alignment 4": (model([number(ALIGN, U32, 4)]), r"'general.alignment'.*found 4, expected a power of two from 8"),
    "alignment 2^31": (model([number(ALIGN, U32, 1 << 31)]), r"'general.alignment'.*found 2147483648"),
    "alignment -32": (model([number(ALIGN, I32, -32)]), r"'general.alignment'.*found -32"),
    "alignment a float": (model([number(ALIGN, F32, 32.0)]), r"'general.alignment'.*found '32.0'"),
    "alignment a string": (model([kv(ALIGN, STRING, string(b"32"))]), r"'general.alignment'.*found '32'"),
    "alignment a bool": (model([number(ALIGN, BOOL, True)]), r"'general.alignment'.*found 'True'"),
    "alignment an array": (model([array(ALIGN, U32, 1, u32(32))]), r"'general.alignment'.*found '\[32\]'"),
    # tensors
    "empty tensor name": (model([], [tensor(b"")], bytes(16)), r"tensor 0 of 1, at byte 24: the tensor's name has 0"),
    "absurd name length": (model([], [string(b"a", LARGEST) + bytes(30)]), rf"name needs {LARGEST} bytes"),
    "name not utf-8": (model([], [tensor(b"\xc3")], bytes(16)), r"name b'\\xc3' is not UTF-8"),
    "five dimensions": (model([], [tensor(dims=(1,) * 5)], bytes(16)), r"tensor 'a', at byte 33: 5 dimensions.*most 4"),
    "2^32-1 dimensions": (model([], [string(b"a") + u32((1 << 32) - 1) + bytes(30)]), r"4294967295 dimensions"),
    "zero dimension": (model([], [tensor(dims=(4, 0))], bytes(16)), r"'a', at byte 45: dimension 1 is 0, expected at"),
    "negative dimension": (model([], [tensor(dims=(LARGEST,))], bytes(16)), r"'a'.*dimension 0 is -1, expected at"),
    "unknown type": (model([], [tensor(kind=99)], bytes(16)), r"tensor 'a', at byte 45: unknown tensor type 99"),
    "removed type": (model([], [tensor(b"w", (32,), 4)], bytes(32)), r"tensor 'w'.*type 4 is Q4_2, which ggml has rem"),
    "row not whole blocks": (
        model([], [tensor(b"w", (576, 2), Q4_K)], bytes(1024)),
        r"tensor 'w'.*row of 576 values is not a whole number of Q4_K blocks: expected a multiple of 256",
    ),
    "a quantized scalar": (model([], [tensor(b"w", (), Q4_0)], bytes(18)), r"tensor 'w'.*row of 1 values"),
    "elements that wrap": (model([], [tensor(dims=(1 << 32, 1 << 32))], bytes(16)), rf"its {1 << 66} bytes .*F32"),
    "bytes that wrap": (model([], [tensor(dims=(1 << 62,))], bytes(16)), rf"its {1 << 64} bytes"),
    "all dimensions": (model([], [tensor(dims=((1 << 63) - 1,) * 4)], bytes(16)), r"bytes .*F32.* truncated or"),
    "truncated data": (model([], [tensor()], bytes(15)), r"tensor 'a'.*its 16 bytes .* end at byte 80 of a file of 79"),
    "no data": (model([], [tensor()]), r"tensor 'a'.*its 16 bytes"),
    "offset past the end": (model([], [tensor(offset=64)], bytes(32)), r"tensor 'a'.*its 16 bytes .* end at byte 144"),
    "offset that wraps": (model([], [tensor(offset=LARGEST - 31)], bytes(32)), r"tensor 'a'.*its 16 bytes"),
    "unaligned offset": (model([], [tensor(offset=16)], bytes(64)), r"'a'.*offset 16 is not a multiple of .* 32"),
    "overlap": (
        model([], [tensor(b"a", (16,)), tensor(b"b", (4,), 0, 32)], bytes(64)),
        r"tensor 'b', at byte 128: overlaps tensor 'a', whose 64 bytes start at 96",
    ),
    "overlap, out of order": (
        model([], [tensor(b"b", (4,), 0, 32), tensor(b"a", (16,))], bytes(64)),
        r"tensor 'b', at byte 128: overlaps tensor 'a'",
    ),
    "same place": (model([], [tensor(b"a"), tensor(b"b")], bytes(16)), r"overlaps tensor"),
    "duplicate tensor": (model([], [tensor(), tensor(offset=32)], bytes(64)), r"'a', at byte 57: .* occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case, tmp_path):
    raw, message = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            open_model(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))
    assert peak < 300_000 + 2 * len(raw)


def test_long_names_are_cut_in_messages(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(model([number(b"k" * 60000, U8, 1)] * 2))
    with pytest.raises(ModelFileError, match=r"metadata key 'k{80}'\.\.\., at byte") as caught:
        open_model(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelFileError, match=re.escape(f"{tmp_path / 'no.gguf'}: no such file")):
        open_model(tmp_path / "no.gguf")


def test_a_file_below_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"cannot be opened: .*Not a directory"):
        open_model(tmp_path / "a" / "b.gguf")


def test_an_impossible_name():
    with pytest.raises(ModelFileError, match="cannot be opened"):
        open_model("a\0b.gguf")


def test_an_empty_file(tmp_path):
    (tmp_path / "e.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"e\.gguf: the file is empty"):
        open_model(tmp_path / "e.gguf")


def test_a_directory(tmp_path):
    with pytest.raises(ModelFileError, match="is a directory, expected a GGUF file"):
        open_model(tmp_path)


def test_a_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "f.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_model(tmp_path / "f.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    path = tmp_path / "p.gguf"
    path.write_bytes(model())
    path.chmod(0)
    with pytest.raises(ModelFileError, match=r"p\.gguf: permission denied"):
        open_model(path)


def test_a_permission_error_is_explained(tmp_path, monkeypatch):
    path = tmp_path / "p.gguf"
    path.write_bytes(model())

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ModelFileError, match=r"p\.gguf: permission denied"):
        open_model(path)
