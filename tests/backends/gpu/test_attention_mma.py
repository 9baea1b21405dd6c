"""Attention by tensor cores, as the simulator computes it: with one simdgroup a row, and with two that share it."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import gpu_cases
import numpy as np
import pytest

from minfer import cases
from minfer.backends.gpu.backend import HALF_BOUND
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.lower import choose
from minfer.backends.reference import ReferenceBackend
from minfer.graph import ir
from minfer.quants import KV_FORMATS

if TYPE_CHECKING:
    from minfer.backends.gpu.backend import GpuBackend
    from minfer.backends.gpu.launch import Launch
    from minfer.cases import Case

#: The cores of the GPU, which decide: fewer than any case has threadgroups, more than any has.
CORES = {1: 0, 2: 1000}
KERNEL = "attention_mma"


def backend(case: Case, sharing: int, **options: Any) -> GpuBackend:
    gpu = gpu_cases.backend(case, **options)
    gpu.device.profile = dataclasses.replace(gpu.device.profile, extra=frozenset(choose.EXTRA), cores=CORES[sharing])
    return gpu


def launches(case: Case, sharing: int) -> list[Launch]:
    opened = cases.Opened(case, backend(case, sharing))
    return [v for listed in opened.launches() for v in listed.launches if v.kernel == KERNEL]


ALL = [c for c in cases.all_cases() if isinstance(c.op, ir.Attn) and launches(c, 1)]
#: Every format, tiles of every size, both windows; the whole list is in the slow run.
QUICK = (
    "attn/f32/head64/n12",
    "attn/q8_0/head96/n12",
    "attn/f16/head128/n12",
    "attn/f16/head40/n12",
    "attn/f32/head256/n12",
    "attn/beyond_f16/rows",
    "attn/beyond_f16/queries",
    "attn/softcap/prefill",
    "attn/sliding16/prefill",
    "attn/gqa9_1/n21+60",
    "attn/prefill65",
    "attn/queries9",
    "attn/span/queries33",
    "attn/spans/two/f16",
)
RUNS = [(name, sharing) for name in QUICK for sharing in (1, 2) if sharing == 1 or "head256" not in name]


def prepare(some: list[tuple[Case, int]]) -> None:
    simulator.prepare((v for case, sharing in some for v in launches(case, sharing)), "checked")


@pytest.fixture(scope="module")
def compiled() -> None:
    prepare([(gpu_cases.by_name(name), sharing) for name, sharing in RUNS])


@pytest.fixture(scope="module")
def compiled_all() -> None:
    prepare([(case, sharing) for case in ALL for sharing in (1, 2)])


@cache
def expected(name: str) -> cases.Array:
    case = gpu_cases.by_name(name)
    return cases.run(case, ReferenceBackend(case.kv_format))[0]


def check(case: Case, sharing: int) -> None:
    """Under all checks, within the class of 11 bits. Heads of more than 128 values are not shared."""
    (launch,) = launches(case, sharing)
    assert isinstance(case.op, ir.Attn)
    assert dict(launch.constants)["sharing"] == (sharing if case.op.head_dim <= 128 else 1)
    gpu = backend(case, sharing, check=True, order="backward")
    got = cases.run(case, gpu)[0]
    assert gpu.bound(case.graph(gpu.name).nodes[-1], case.kind, 0.0) == HALF_BOUND
    assert cases.error(got, expected(case.name)) <= HALF_BOUND


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("name", "sharing"), RUNS)
def test_checked(name: str, sharing: int) -> None:
    check(gpu_cases.by_name(name), sharing)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_all")
@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_checked_all(case: Case, sharing: int) -> None:
    check(case, sharing)


def test_cases_have_every_head_format_and_window() -> None:
    """And on both sides of the heads that are shared."""
    seen = {(c.op.head_dim, c.kv_format) for c in ALL if isinstance(c.op, ir.Attn)}
    assert {(d, "f32") for d in (8, 40, 64, 80, 96, 128, 248, 256)} <= seen
    assert {choose.SHARING_MAX_HEAD, 248} <= {d for d, _ in seen}
    assert {(c.window, c.kv_format) for c in ALL} == {(layout, fmt) for layout in (0, 2) for fmt in KV_FORMATS}


# --- what is known without another result ------------------------------------------------------------------------


def run(case: Case, sharing: int, **inputs: Any) -> np.ndarray[Any, Any]:
    data = {**case.data(), **inputs}
    case = dataclasses.replace(case)
    object.__setattr__(case, "data", lambda seed=0: data)
    return np.asarray(cases.run(case, backend(case, sharing))[0])


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("fmt", ["f32", "f16"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sliding", [None, 5])
def test_odd_rows_reach_those_that_read_them_and_no_others(
    odd: float, fmt: str, sliding: int | None, sharing: int
) -> None:
    """The last row's key and value are read by the last query alone, and a sliding window leaves the first rows."""
    case = cases.causal("odd", 64, 2, 1, 20, 60, fmt, sliding=sliding)
    clean, data = run(case, sharing), case.data()
    for name in ("kv_k", "kv_v"):
        changed = data[name].copy()
        changed[-1] = odd
        got = run(case, sharing, **{name: changed})
        assert np.array_equal(got[:-1], clean[:-1])
        assert name == "kv_k" or not np.isfinite(got[-1]).any()
        if sliding:
            changed = data[name].copy()
            changed[: 61 - sliding] = odd
            assert np.array_equal(run(case, sharing, **{name: changed}), clean)
    one = data["kv_v"].copy()
    one[70, 3] = odd  # queries 10 ... 19, or 10 ... 14, in one column
    got = run(case, sharing, kv_v=one).reshape(20, 2, 64)
    reading = slice(10, 15 if sliding else 20)
    assert not np.isfinite(got[reading, :, 3]).any()
    got[reading, :, 3] = clean.reshape(20, 2, 64)[reading, :, 3]
    assert np.array_equal(got.reshape(20, 128), clean)


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_weights_add_up_to_one(fmt: str, sharing: int) -> None:
    """The sum that results are divided by is that of the rounded weights: a constant value comes back."""
    got = run(cases.causal("constant", 64, 2, 1, 20, 60, fmt, fill_v=0.75), sharing)
    assert np.abs(got - 0.75).max() <= 2.0**-22


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_queries_of_zeros_give_the_mean(fmt: str, sharing: int) -> None:
    """Whatever the scale: a row of zeros has no power of two of its own."""
    case = cases.causal("zeros", 64, 1, 1, 20, 60, fmt, scale=2.0**10)
    stored = KV_FORMATS[fmt].unpack(KV_FORMATS[fmt].pack(case.data()["kv_v"]), 64)
    want = [stored[: 61 + i].mean(axis=0) for i in range(20)]
    got = run(case, sharing, x0=np.zeros((20, 64), np.float32))
    assert cases.error(got, np.array(want, np.float32)) <= HALF_BOUND


@pytest.mark.parametrize("sharing", [1, 2])
def test_queries_without_rows_give_zeros(sharing: int) -> None:
    spans = tuple(v for i in range(40) for v in ((5, 5) if i % 2 else (3, 60)))
    got = run(cases.windowed("empty", 2, spans, 40, "f32", None), sharing)
    assert not got[1::2].any()
    assert np.abs(got[::2]).min(axis=1).all()


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_rows_that_no_query_reads_are_not_touched(fmt: str, sharing: int) -> None:
    case = gpu_cases.by_name(f"attn/spans/two/{fmt}")
    gpu = backend(case, sharing, check=True)
    cases.run(case, gpu)
    (report,) = [r for s, r in gpu.device.reports if s.launch.kernel == KERNEL]
    spans = np.array(case.inputs[2].integers).reshape(-1, 2)
    rows = {cell for low, high in spans for cell in range(low, high)}
    assert case.kv
    for slot in (4, 5):
        assert report.counters.read_distinct[slot] == len(rows) * KV_FORMATS[fmt].row_bytes(case.kv.n_values)


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_sliding_window_costs_its_rows(sharing: int) -> None:
    """Other rows are neither read nor walked over."""
    barriers = set()
    for past in (480, 960):  # whole tiles
        case = cases.causal("sliding", 64, 2, 1, 20, past, sliding=16)
        gpu = backend(case, sharing, check=True)
        cases.run(case, gpu)
        (report,) = [r for s, r in gpu.device.reports if s.launch.kernel == KERNEL]
        assert report.counters.read_distinct[4] == (20 + 15) * 64 * 4
        barriers.add(report.counters.barriers)
    assert len(barriers) == 1
