"""Every op case on the simulator against the reference, in both orders of lanes; and under all checks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import gpu_cases
import numpy as np
import pytest

from minfer import cases
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.kernels import FAMILIES
from minfer.backends.gpu.lower import choose
from minfer.backends.reference import ReferenceBackend
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from minfer.cases import Case

CASES = cases.all_cases()
#: What kernels are chosen by: a device that takes the plain ones, and one like CUDA that asks for its own.
PLAIN = simulator.SimulatorDevice().profile
EVERY = replace(
    PLAIN,
    extra=frozenset(choose.EXTRA),
    whole_rows=512,
    split_rows=128,
    max_splits=choose.MAX_SPLITS,
    max_threadgroup_bytes=200_000,
    cores=200,
)
PROFILES = (PLAIN, EVERY)


@pytest.fixture(scope="module")
def compiled() -> None:
    gpu_cases.compile_all(CASES)


@cache
def expected(name: str) -> list[cases.Array]:
    case = gpu_cases.by_name(name)
    return cases.run(case, ReferenceBackend(case.kv_format))


def run(case: Case, **options: object) -> list[cases.Array]:
    gpu = gpu_cases.backend(case, **options)
    got = cases.run(case, gpu)
    assert gpu.device.encoded == len(case.graph(gpu.name).outputs[:1])  # it ran there, in one program
    return got


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    got = run(case)
    want = expected(case.name)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert cases.error(g, w) <= cases.BOUNDS[case.kind]
    for a, b in zip(run(case, order="backward"), got, strict=True):
        np.testing.assert_array_equal(a, b, "the order of the lanes changes the result")


# --- under all checks --------------------------------------------------------------------------------------------

#: One small case or more of each kernel; the whole list is in the slow run. Cases of thousands of rows are for speed.
QUICK = (
    "embed/Q4_1",
    "top_k/1025x2/k40",
    "top_k/nan/k40",
    "embed/Q6_K",
    "embed/F16",
    "get_rows",
    "permute/201",
    "swiglu/33x1",
    "softmax/33x1",
    "rms_norm/33x1",
    "head_norm/80",
    "rope/neox/partial",
    "kv_store/q8_0/96x3",
    "kv_store/f16/96x3",
    "head_rope_store/norm/q8_0/head64/biased/normed",
    "attn/map/q8_0/sliding5",
    "attn/span/f16/full",
    "attn/spans/two/f16",
    "attn/sliding3/decode",
    "attn/sliding16/prefill",
    "attn/decode1000",
    "attn/few_of_many_cells/q8_0",
    "project/norm_qkv/n1",
    "project/bias/n2",
    "project/add/n3",
    "project/geglu/n5",
    "project/swiglu/Q4_1/n1",
    "project/add/n9",
    "project/swiglu/BF16/n33",
)
LONG = ("/constant_v/",)
SHORT = [case for case in CASES if not any(part in case.name for part in LONG)]


def check(case: Case, order: str) -> None:
    """A checked run: a finding raises. Every launch gave a report, and what it touched is what it declared."""
    gpu = gpu_cases.backend(case, check=True, order=order)
    got = cases.run(case, gpu)
    assert len(gpu.device.reports) == len(gpu_cases.launches(case)) > 0
    for g, w in zip(got, expected(case.name), strict=True):
        assert cases.error(g, w) <= cases.BOUNDS[case.kind]


def test_the_quick_list_has_every_kernel() -> None:
    listed = gpu_cases.variants(gpu_cases.by_name(name) for name in QUICK)
    every = gpu_cases.variants(CASES)
    missing = {launch.kernel for launch in every} - {launch.kernel for launch in listed}
    assert missing <= {"attention_g1", "attention_g4", "attention_g8", "copy_strided"}, "instances of kernels listed"


def test_the_checked_cases_have_every_variant() -> None:
    every, checked = (
        {(launch.family, launch.kernel, launch.constants) for launch in gpu_cases.variants(some)}
        for some in (CASES, SHORT)
    )
    assert every == checked


@pytest.fixture(scope="module")
def compiled_quick() -> None:
    gpu_cases.compile_all(map(gpu_cases.by_name, QUICK), "checked")


@pytest.mark.usefixtures("compiled_quick")
@pytest.mark.parametrize("name", QUICK)
def test_checked(name: str) -> None:
    check(gpu_cases.by_name(name), "forward")


@pytest.mark.parametrize("order", ["forward", "shuffled"])
@pytest.mark.parametrize(
    "name",
    [
        "attn/f32/head64/n5",
        "attn/gqa5_1/n1+600",
        "attn/long/f16/head128",
        "attn/long/q8_0/head256",
        "attn/long/f32/map",
        "attn/span/q8_0/sliding5",
        "attn/map/f16/full",
    ],
)
def test_checked_wide_attention(name: str, order: str) -> None:
    """The kernels that a device like CUDA asks for: whole windows, parts, rows that are nobody's."""
    case = gpu_cases.by_name(name)
    gpu = gpu_cases.backend(case, check=True, order=order)
    gpu.device.profile = EVERY
    got = cases.run(case, gpu)
    assert any(step.launch.family == "attention_wide" for step, _ in gpu.device.reports)
    for g, w in zip(got, expected(case.name), strict=True):
        assert cases.error(g, w) <= cases.BOUNDS[case.kind]


@pytest.fixture(scope="module")
def compiled_checked() -> None:
    gpu_cases.compile_all(CASES, "checked")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_checked")
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_checked_all(case: Case) -> None:
    check(case, "backward")


# --- products of one token as CUDA has them ------------------------------------------------------------------------

#: Every weight type that has blocks, every epilogue, each edge of a slice and a pass.
WIDE = [
    case
    for case in CASES
    if case.name.startswith(("matmul_bias/", "matmul/wide/", "project/"))
    and case.inputs[0].shape[1] == 1
    and all(FORMATS[w.type].block_size > 1 for w in ir.weights_of(case.op) if len(w.shape) == 2)
]
WIDE_CHECKED = (
    "matmul_bias/Q6_K",
    "matmul/wide/Q4_0/5152",
    "project/wide/qkv",
    "project/norm_qkv/n1",
    "project/swiglu/MXFP4/n1",
)


@pytest.fixture(scope="module")
def compiled_wide() -> None:
    gpu_cases.compile_all(WIDE, extra=["wide"])


@pytest.mark.usefixtures("compiled_wide")
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_wide(case: Case) -> None:
    gpu = gpu_cases.backend(case, extra=["wide"])
    assert {v.kernel for some in cases.Opened(case, gpu).launches() for v in some.launches} == {"project_wide"}
    got = cases.run(case, gpu_cases.backend(case, extra=["wide"]))
    (want,) = expected(case.name)
    assert cases.error(got[0], want) <= cases.BOUNDS["matmul"]


@pytest.mark.parametrize("name", WIDE_CHECKED)
def test_wide_checked(name: str) -> None:
    case = next(case for case in WIDE if case.name.startswith(name))
    (got,) = cases.run(case, gpu_cases.backend(case, extra=["wide"], check=True, order="shuffled"))
    assert cases.error(got, expected(case.name)[0]) <= cases.BOUNDS["matmul"]


# --- the list itself ---------------------------------------------------------------------------------------------


def test_cases_stand_on_both_sides_of_every_threshold() -> None:
    """Of the table that chooses kernels: tokens of a product, heads of a group, queries, rows of a region."""
    products: dict[bool, set[int]] = {False: set(), True: set()}
    groups: set[int] = set()
    queries: dict[int, dict[int, set[int]]] = {}  # by layout of the window, by queries: the cells of the region
    for case in CASES:
        if isinstance(case.op, (ir.MatMul, ir.Project)):
            products[bool(getattr(case.op, "norm", None))].add(case.inputs[0].shape[1])
        elif isinstance(case.op, ir.Attn):
            assert case.kv
            groups.add(case.op.n_head // case.op.n_kv_head)
            queries.setdefault(case.window, {}).setdefault(case.inputs[0].shape[1], set()).add(case.kv.n_cells)
    for edge in {choice.max_tokens for choice in choose.PRODUCTS} - {choose.MANY}:
        assert {edge, edge + 1} <= products[False], f"{edge} tokens and one more"
        normed = {edge, edge + 1} if edge < choose.NORM_MAX_TOKENS else {edge}
        assert normed <= products[True], f"{edge} tokens with a norm"
    for edge in choose.HEAD_GROUPS:
        assert {edge, edge + 1} <= groups, f"{edge} query heads a KV head and one more"
    for profile in PROFILES:
        for edge in (profile.whole_rows, profile.max_splits * profile.split_rows):
            assert {edge, edge + 1} <= queries[0][1], f"{edge} rows and one more"
        for layout, tiled in choose.TILED_MIN_QUERIES.items():
            for n in (choose.SPLIT_MAX_QUERIES, choose.SPLIT_MAX_QUERIES + 1, tiled - 1, tiled):
                assert max(queries[layout][n]) > profile.whole_rows, f"{n} queries over rows that are split"


@pytest.mark.parametrize("threadgroup_bytes", [PLAIN.max_threadgroup_bytes, EVERY.max_threadgroup_bytes])
@pytest.mark.parametrize(("type_", "slice_"), [("Q4_0", 1024), ("Q4_K", 2048)])
def test_wide_cases_fill_a_slice_and_a_pass(type_: str, slice_: int, threadgroup_bytes: int) -> None:
    """And have a block more than each."""
    taken: dict[int, tuple[int, int]] = {}  # by inputs: simdgroups a row, passes
    for case in CASES:
        if isinstance(case.op, ir.MatMul) and case.op.weight.type == type_ and case.inputs[0].shape[1] == 1:
            gpu = gpu_cases.backend(case, extra=["wide"])
            gpu.device.profile = replace(gpu.device.profile, max_threadgroup_bytes=threadgroup_bytes)
            (listed,) = cases.Opened(case, gpu).launches()
            constants = dict(listed.launches[0].constants)
            taken[case.op.weight.shape[0]] = int(constants["across"]), int(constants["passes"])
    block = FORMATS[type_].block_size
    assert (taken[slice_], taken[slice_ + block]) == ((1, 1), (2, 1))
    full = max(n for n, (_, passes) in taken.items() if passes == 1)
    assert taken[full][0] * slice_ == full
    assert taken[full + block][1] == 2


def test_the_list_runs_every_kernel() -> None:
    """On a device with every tier, or on one without those that a device must ask for."""
    ran = set()
    for profile in PROFILES:
        families = set()
        for case in CASES:
            gpu = gpu_cases.backend(case)
            gpu.device.profile = profile
            launched = [v for some in cases.Opened(case, gpu).launches() for v in some.launches]
            ran |= {launch.kernel for launch in launched}
            families |= {launch.family for launch in launched}
        assert families <= set(FAMILIES) - choose.left_out(profile)
        assert profile is EVERY or families == set(FAMILIES) - choose.left_out(profile)
    moves = {"move_rows"}  # of KV rows: no op, and tested where rows move
    assert ran | moves == {name for family in FAMILIES for name in simulator.library(family).kernel_names}
