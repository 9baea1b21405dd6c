"""Hostile files: a clean open or ModelFileError, nothing else, and no more memory than the file warrants."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer.errors import ModelFileError
from minfer.gguf import StringArray, Tensor, open_model, write_model
from minfer.quants import FORMATS

DATA = Path(__file__).parent.parent / "data"
REAL = {path.stem: path.read_bytes() for path in sorted(DATA.glob("header-*.gguf"))}
MUTATIONS = 300  # of each real header

bounded = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def open_and_look(path: Path) -> bool:
    """Open, and touch everything that the header promises; False where refused."""
    try:
        model = open_model(path)
    except ModelFileError:
        return False
    with model:
        for value in model.metadata.values():
            if isinstance(value, StringArray):
                assert sum(map(len, value)) <= path.stat().st_size
        for name, tensor in model.tensors.items():
            assert model.data(name).nbytes == tensor.nbytes
            int(model.data(name)[-1, -1])
    return True


# Numbers that break readers: signs, sizes, products that wrap, and small ones that shift what follows.
EDGES = [0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 256, 65535, 65536]
EDGES += [n + d for n in (1 << 31, 1 << 32, 1 << 61, 1 << 63, 1 << 64) for d in (-8, -1, 0, 1) if n + d < 1 << 64]


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """One to three faults: a bit, a number, bytes removed, repeated, or cut off."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # the entries of the header's start and of its end (the tensors') matter most
        at = rng.choice((rng.randrange(min(len(out), 600)), rng.randrange(len(out))))
        fault = rng.randrange(6)
        if fault == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif fault == 1:
            out[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
        elif fault == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)
        elif fault == 3:
            del out[at : at + rng.randrange(1, 40)]
        elif fault == 4:
            out[at:at] = out[at : at + rng.randrange(1, 40)]
        else:
            del out[at:]
        if not out:
            break
    return bytes(out)


@pytest.mark.parametrize("name", REAL)
def test_the_real_headers_open(name, tmp_path):
    assert open_and_look(DATA / f"{name}.gguf")


@pytest.mark.parametrize("name", REAL)
def test_mutations_of_real_headers(name, tmp_path):
    rng = random.Random(name)
    path = tmp_path / "m.gguf"
    opened = 0
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            raw = mutate(REAL[name], rng)
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            opened += open_and_look(path)
            assert tracemalloc.get_traced_memory()[1] - before < 300_000 + 4 * len(raw)
    finally:
        tracemalloc.stop()
    assert 0 < opened < MUTATIONS  # both outcomes were tried


@pytest.mark.parametrize("name", REAL)
def test_every_length_of_a_header_is_refused(name, tmp_path):
    path = tmp_path / "m.gguf"
    raw = REAL[name]
    for length in random.Random(1).sample(range(1, len(raw) - 1), 200):
        path.write_bytes(raw[:length])
        if open_and_look(path):
            assert len(raw) - length < 32  # only the last tensor's padding is missing


@bounded
@given(st.binary(max_size=400))
def test_arbitrary_bytes(tmp_path, tail):
    path = tmp_path / "m.gguf"
    for head in (b"", b"GGUF", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + struct.pack("<QQ", 1, 1)):
        path.write_bytes(head + tail)
        open_and_look(path)


NAMES = (
    st.text(min_size=1, max_size=12)
    .filter(lambda s: s != "general.alignment" and not s.startswith("split."))
    .filter(lambda s: s.isprintable())
)
INTS = st.integers(-(1 << 63), (1 << 63) - 1)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(st.binary(max_size=8), max_size=6),
    st.lists(INTS, min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
TENSORS = st.tuples(
    st.sampled_from(list(FORMATS.values())),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), max_size=3),
)


@bounded
@given(
    metadata=st.dictionaries(NAMES, VALUES, max_size=8),
    tensors=st.dictionaries(NAMES, TENSORS, max_size=6),
    alignment=st.sampled_from([8, 32, 128]),
    max_part_bytes=st.sampled_from([None, 64, 4096]),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_written_is_read(tmp_path, metadata, tensors, alignment, max_part_bytes, seed):
    rng = np.random.default_rng(seed)
    listed = []
    for name, (fmt, blocks, dims) in tensors.items():
        shape = (blocks * fmt.block_size, *dims)
        data = rng.integers(0, 256, (int(np.prod(dims, dtype=int)), blocks * fmt.block_bytes), np.uint8)
        listed.append(Tensor(name, fmt, shape, data))
    written = write_model(tmp_path / "m.gguf", metadata, listed, alignment=alignment, max_part_bytes=max_part_bytes)
    with open_model(written[-1]) as model:
        for key, value in metadata.items():
            got = model.metadata[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == value
        assert list(model.tensors) == list(tensors)
        for t in listed:
            assert model.tensors[t.name].shape == t.shape
            assert model.tensors[t.name].offset % alignment == 0
            np.testing.assert_array_equal(model.data(t.name), t.data)
    for path in written:
        path.unlink()


@bounded
@given(st.data())
def test_mutations_of_small_models(tmp_path, data):
    """Hypothesis chooses the faults, so that it can shrink what it finds."""
    raw = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 8))
        raw[at : at + 8] = data.draw(
            st.one_of(st.binary(min_size=8, max_size=8), st.sampled_from(EDGES).map(lambda n: struct.pack("<Q", n)))
        )
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    open_and_look(path)


def _small() -> bytes:
    from gguf_bytes import BOOL, F32, I32, STRING, U32, array, kv, model, number, string, tensor

    return model(
        [
            number(b"general.alignment", U32, 32),
            kv(b"s", STRING, string(b"text")),
            array(b"t", STRING, 3, string(b"a") + string(b"bc") + string(b"")),
            array(b"b", BOOL, 3, b"\0\1\0"),
            array(b"i", I32, 2, bytes(8)),
            number(b"f", F32, 1.0),
        ],
        [tensor(b"a", (32, 2), 2), tensor(b"b", (4,), 0, 64)],
        bytes(96),
    )


SMALL = _small()
