"""Launches as data: hazards, barriers, argument structs, the choice table, golden launch plans.

`python tests/backends/gpu/test_gpu_launch.py` writes the golden file anew; read the difference before you commit it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import DATA, TINY, TINY_MODELS, open_engine
from minfer.backends.gpu import args
from minfer.backends.gpu.kernels import FAMILIES, source
from minfer.backends.gpu.launch import (
    Binding,
    Launch,
    LaunchList,
    Ref,
    barriers,
    conflict,
    hazards,
    prove_ordered,
)
from minfer.backends.gpu.lower import THREADGROUP_BYTES, Profile, choose, project
from minfer.errors import GraphError, RequestError
from minfer.msl.library import Library

GOLDEN = DATA / "golden_launches.json"
PROFILE = Profile("test", True, 1024, 32768, 1 << 32)


def one(*bindings: Binding, node: str = "n") -> Launch:
    return Launch(node, "f", "k", (), "norm_args", b"", bindings, (1, 1, 1), 32, 0, 0)


def touch(buffer: int, start: int, end: int, access: Any = "read") -> Binding:
    return Binding(1, Ref("pool", buffer), start, end, access)


# --- hazards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        (touch(0, 0, 8, "write"), touch(0, 4, 12), True),  # read after write
        (touch(0, 0, 8), touch(0, 4, 12, "write"), True),  # write after read
        (touch(0, 0, 8, "write"), touch(0, 7, 9, "write"), True),  # write after write
        (touch(0, 0, 8, "both"), touch(0, 0, 8, "both"), True),
        (touch(0, 0, 8), touch(0, 0, 8), False),  # two reads
        (touch(0, 0, 8, "write"), touch(0, 8, 16), False),  # side by side
        (touch(0, 0, 8, "write"), touch(1, 0, 8), False),  # another buffer
    ],
)
def test_hazards_are_overlaps_with_a_write(first: Binding, second: Binding, clash: bool) -> None:
    launches = [one(first), one(second)]
    assert conflict(*launches) == clash
    assert hazards(launches) == ((), (0,) if clash else ())
    assert barriers(launches) == (False, clash)


def test_a_barrier_stands_only_where_it_must() -> None:
    # Two independent chains side by side: one barrier serves both.
    launches = [
        one(touch(0, 0, 8, "write")),
        one(touch(1, 0, 8, "write")),
        one(touch(0, 0, 8), touch(2, 0, 8, "write")),
        one(touch(1, 0, 8), touch(3, 0, 8, "write")),
    ]
    assert barriers(launches) == (False, False, True, False)
    assert hazards(launches) == ((), (), (0,), (1,))


def test_an_edge_that_others_imply_is_left_out() -> None:
    launches = [
        one(touch(0, 0, 8, "write")),
        one(touch(0, 0, 8), touch(1, 0, 8, "write")),
        one(touch(0, 0, 8), touch(1, 0, 8)),
    ]
    assert hazards(launches) == ((), (0,), (1,))


def test_the_proof_names_a_pair_without_a_barrier() -> None:
    launches = [one(touch(0, 0, 8, "write"), node="a"), one(touch(0, 0, 8), node="b")]
    prove_ordered(launches, (False, True))
    with pytest.raises(GraphError, match=r"a \(k\) and b \(k\) touch the same bytes"):
        prove_ordered(launches, (False, False))


bindings = st.builds(
    touch, st.integers(0, 2), st.integers(0, 6), st.integers(7, 12), st.sampled_from(("read", "write", "both"))
)


@given(st.lists(st.lists(bindings, min_size=1, max_size=3), max_size=9))
def test_barriers_and_edges_order_every_conflict(lists: list[list[Binding]]) -> None:
    launches = [one(*some) for some in lists]
    prove_ordered(launches, barriers(launches))
    edges = hazards(launches)
    reached: list[set[int]] = []
    for direct in edges:
        reached.append(set(direct).union(*(reached[j] for j in direct)))
    for i, launch in enumerate(launches):
        assert all(j in reached[i] for j in range(i) if conflict(launches[j], launch))


# --- argument structs --------------------------------------------------------------------------------------------


def test_a_struct_packs_and_declares_alike() -> None:
    raw = args.PROJECT.pack(n_in=1, n_out=2, n_tokens=3, rows=(4, 5, 6), row_bytes=(7, 8, 9), eps=0.5)
    assert raw == struct.pack("<9If", 1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5)
    assert args.PROJECT.unpack(raw)["rows"] == (4, 5, 6)
    assert "uint rows[3];" in args.PROJECT.msl
    assert f"sizeof(project_args) == {len(raw)}" in args.PROJECT.msl


@pytest.mark.parametrize("wrong", [{"n": 1}, {"n": 1, "eps": 0.0, "more": 1}, {"n": (1, 2), "eps": 0.0}])
def test_a_struct_refuses_other_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="norm_args"):
        args.NORM.pack(**wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_metal_and_state_their_threadgroup_memory(family: str) -> None:
    text = source(family)
    library = Library(text, name=f"{family}.metal")  # refuses what Metal refuses
    assert '#include "' not in text
    for name in library.kernel_names:
        declared = THREADGROUP_BYTES.get(name)
        kernel = library.unit.instances[name].kernel
        if kernel.threadgroup and family != "heads":
            small = ("attention_", "gemm_inputs", "project_wide", "rms_norm", "top_")  # less than the largest stated
            assert declared or name.startswith(small), name


# --- the choice table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "kernel"),
    [
        (1, "project_t1"),
        (2, "project_t2"),
        (3, "project_t4"),
        (4, "project_t4"),
        (5, "project_t8"),
        (8, "project_t8"),
        (9, "gemm"),
        (512, "gemm"),
    ],
)
def test_products_by_token_count(n_tokens: int, kernel: str) -> None:
    assert choose.product(PROFILE, n_tokens).kernel == kernel


@pytest.mark.parametrize(
    ("n_tokens", "coded", "kernel"),
    [
        (1, True, "project_wide"),
        (1, False, "project_t1"),
        (2, True, "project_t2"),
        (8, True, "project_t8"),
        (9, True, "gemm_mma"),
        (9, False, "gemm_mma"),
    ],
)
def test_products_of_a_device_with_tiers_of_its_own(n_tokens: int, coded: bool, kernel: str) -> None:
    own = dataclasses.replace(PROFILE, extra=frozenset(choose.EXTRA))
    assert choose.product(own, n_tokens, coded=coded).kernel == kernel
    off = dataclasses.replace(own, off=frozenset(choose.EXTRA))
    assert choose.product(off, n_tokens, coded=coded) == choose.product(PROFILE, n_tokens)


@pytest.mark.parametrize(
    ("n_tokens", "rows", "tile"),
    [
        (32, 12800, (32, 32, 1)),  # a tile of 64 tokens would be half empty
        (33, 12800, (64, 64, 2)),  # 200 tiles for 200 cores
        (64, 12800, (64, 64, 2)),
        (65, 12800, (128, 64, 2)),
        (512, 100 * 64, (128, 64, 1)),  # 4 x 100
        (512, 99 * 64, (128, 64, 2)),
        (512, 25 * 64, (128, 64, 2)),  # 4 x 25 in two parts
        (512, 24 * 64, (64, 64, 2)),
        (512, 13 * 64, (64, 64, 2)),  # 8 x 13 in two parts
        (512, 12 * 64, (32, 32, 2)),
    ],
)
def test_tiles_fill_the_cores(n_tokens: int, rows: int, tile: tuple[int, int, int]) -> None:
    gpu = dataclasses.replace(PROFILE, cores=200, max_threadgroup_bytes=200_000)
    assert choose.mma_tile(gpu, n_tokens, rows, lambda tokens, _: 256 * tokens) == tile


@pytest.mark.parametrize(
    ("rows", "nbytes", "tile"),
    [
        (12800, 50_000, (128, 64, 1)),
        (99 * 64, 50_000, (128, 64, 2)),  # two threadgroups of two parts
        (99 * 64, 50_001, (128, 64, 1)),
        (12800, 200_000, (128, 64, 1)),
        (12800, 200_001, (64, 64, 1)),  # half of it, and room for one
    ],
)
def test_tiles_fit(rows: int, nbytes: int, tile: tuple[int, int, int]) -> None:
    gpu = dataclasses.replace(PROFILE, cores=200, max_threadgroup_bytes=200_000)
    assert choose.mma_tile(gpu, 512, rows, lambda tokens, _: nbytes * tokens // 128) == tile


@pytest.mark.parametrize(
    ("type_", "stride"),
    [
        ("Q4_0", 176),  # eight blocks of 18 and up to 15 bytes before them, an odd number of 16
        ("Q4_K", 144),
        ("Q6_K", 240),
        ("Q8_0", 176),
        ("F16", 272),
        ("F32", 272),
    ],
)
def test_the_threadgroup_memory_of_a_tile(type_: str, stride: int) -> None:
    scales = {"Q4_0": 8, "Q4_K": 16, "Q6_K": 16, "Q8_0": 4, "F16": 4, "F32": 2}[type_]  # and minima
    assert project.tile_bytes(type_, 64, 64) == 2 * 64 * 128 + 64 * (2 * stride + 4 * scales + 8)


def test_tiers_can_be_switched_off() -> None:
    off = Profile("test", True, 1024, 32768, 1 << 32, off=choose.tiers_off("gemm:off,attn:generic"))
    assert choose.product(off, 100).kernel == "project_t8"
    assert choose.splits(off, 1, 100_000) == 1
    assert not choose.tiled(off, 100, 0)
    with pytest.raises(RequestError, match="'fast:on' is none of gemm:off"):
        choose.tiers_off("fast:on")


def test_attention_by_shape() -> None:
    assert [choose.head_group(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert choose.head_group(7, alone=True) == 1
    assert [choose.splits(PROFILE, 1, n) for n in (1, 256, 257, 512, 513, 4096, 100_000)] == [1, 1, 2, 2, 3, 16, 16]
    assert [choose.splits(PROFILE, n, 4096) for n in (8, 9)] == [16, 1]
    assert [choose.tiled(PROFILE, n, 0) for n in (8, 9)] == [False, True]
    assert [choose.tiled(PROFILE, n, 2) for n in (9, 32, 33)] == [False, False, True]
    assert not choose.tiled(PROFILE, 1000, 8)
    assert not choose.attention_mma(PROFILE, 1000, 0)
    rows = (1, 256, 257, 512, 513, 900, 1024, 5000)
    assert [choose.bucket(PROFILE, 1, n, 1000) for n in rows] == [256, 256, 512, 512, 1000, 1000, 1000, 1000]
    assert choose.bucket(PROFILE, 9, 1, 1000) == 1000  # its attention is not split: one program
    assert choose.bucket(PROFILE, 1, 1, 100) == 100


def test_attention_by_tensor_cores_takes_the_tiles() -> None:
    own = dataclasses.replace(PROFILE, extra=frozenset(choose.EXTRA), cores=132)
    assert [choose.attention_mma(own, n, 0) for n in (8, 9)] == [False, True]
    assert [choose.attention_mma(own, n, 2) for n in (9, 32, 33)] == [False, False, True]
    assert not choose.attention_mma(own, 1000, 8)
    assert not choose.attention_mma(dataclasses.replace(own, off=frozenset({"mma"})), 1000, 0)
    assert [choose.sharing(own, 128, n) for n in (1, 132, 133)] == [2, 2, 1]
    assert [choose.sharing(own, d, 1) for d in (8, 128, 136, 256)] == [2, 2, 1, 1]


# --- golden launch plans -----------------------------------------------------------------------------------------


def golden(name: str) -> dict[str, list[str]]:
    """A line a launch of a model's first layer and of what is outside the layers, for a token and for a batch."""
    engine = open_engine(TINY / f"{name}.gguf", device="simulator", n_ctx=1024)
    found = {}
    for n in (1, 20):
        ((_, listed),) = engine.launches(engine.plan(n))
        assert isinstance(listed, LaunchList)
        fences = barriers(listed.launches)
        found[f"{n} tokens"] = [
            f"{'| ' if fence else ''}{launch.node}: {launch.kernel} "
            f"{' '.join(f'{k}={v:d}' for k, v in launch.constants)} {'x'.join(map(str, launch.grid))}"
            for launch, fence in zip(listed.launches, fences, strict=True)
            if not re.match(r"blk\.[1-9]", launch.node)
        ]
    return found


@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_launches(name: str) -> None:
    assert golden(name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden(name) for name in TINY_MODELS}, indent=1) + "\n")
