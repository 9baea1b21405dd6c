"""The oracle against the definitions (`doctor/definitions.py`), on every op case."""

from __future__ import annotations

import numpy as np
import pytest

from minfer import cases
from minfer.backends.reference import ReferenceBackend, matmul, rms_norm
from minfer.cases import Case
from minfer.doctor.definitions import evaluate
from minfer.errors import RequestError
from minfer.graph import ir
from minfer.graph.rules import RULES
from minfer.quants import KV_FORMATS

CASES = cases.all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    backend = ReferenceBackend(case.kv_format)
    got = cases.run(case, backend)
    want = evaluate(case)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert g.dtype == (np.int32 if np.issubdtype(w.dtype, np.integer) else np.float32)
        assert cases.error(g, w) <= backend.bound(case.graph("reference").nodes[-1], case.kind, 1.0) <= 2e-5


def test_every_op_has_a_case() -> None:
    assert {type(case.op) for case in CASES} == set(RULES) - {ir.Input}


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_error_sees_nan_inf_and_shape() -> None:
    want = np.array([1.0, 2.0, np.inf])
    assert cases.error(want.copy(), want) == 0
    assert cases.error(np.array([1.0, 2.0, 3.0]), want) == np.inf
    assert cases.error(np.array([np.nan, 2.0, np.inf]), want) == np.inf
    assert cases.error(want[:2], want) == np.inf
    assert cases.error(np.array([70000, 70001]), np.array([70000, 70002])) == np.inf
    assert cases.error(np.array([1.0, 2.5, np.inf]), want) == pytest.approx(0.5 / np.sqrt(2.5))


# --- exact results -----------------------------------------------------------------------------------------------


def _by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_a_window_of_one_row_returns_that_v_row(fmt: str) -> None:
    case = _by_name(f"attn/one_row/{fmt}")
    (out,) = cases.run(case, ReferenceBackend(fmt))
    kept = KV_FORMATS[fmt].unpack(KV_FORMATS[fmt].pack(case.data()["kv_v"]), 64)
    assert np.array_equal(out.reshape(2, 64), np.repeat(kept, 2, axis=0))


def test_runs_in_any_order_are_their_rows() -> None:
    """Cells 0, 1, 7, 3: as many as from the first to the last, and others."""
    ordered, other = (
        cases.run(cases.windowed("runs", 8, window, 1, "f32", None), ReferenceBackend())[0]
        for window in ((0, 2, 3, 1, 7, 1, 0, 0), (0, 2, 7, 1, 3, 1, 0, 0))
    )
    assert np.abs(ordered - other).max() < 1e-6


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_many_rows_of_constant_v_give_the_constant(fmt: str) -> None:
    (out,) = cases.run(_by_name(f"attn/constant_v/{fmt}"), ReferenceBackend(fmt))
    kept = KV_FORMATS[fmt].unpack(KV_FORMATS[fmt].pack(np.full((1, 64), 0.7, np.float32)), 64)
    assert np.abs(out - kept[0, 0]).max() < 1e-6


def test_constants_through_norm_and_matmul() -> None:
    """A constant vector normalizes to ones; 0.5 (gain) x 0.25 (weight) x 4096 (terms) is 512, exactly."""
    gain, weight = np.full(4096, 0.5, np.float32), np.full((3, 4096), 0.25, np.float32)
    x = np.full((2, 4096), 7.0, np.float32)
    assert np.array_equal(matmul(rms_norm(x, gain, 0.0), weight), np.full((2, 3), 512, np.float32))


def test_a_window_shifted_by_one_changes_the_result() -> None:
    spans = {"here": (10, 20), "shifted": (11, 21)}
    results = {}
    for name, span in spans.items():
        case = cases.windowed("shift", 2, span, 1, "f32", None)
        results[name] = cases.run(case, ReferenceBackend())[0]
    assert np.abs(results["here"] - results["shifted"]).max() > 1e-3


def test_cells_and_tokens_out_of_range_are_refused() -> None:
    store = _by_name("kv_store/f32/96x3")
    bad = Case(store.name, store.op, (*store.inputs[:2], cases.Value((3,), integers=(4, 2, 13))), "kv", store.kv)
    with pytest.raises(RequestError, match="cells 2 to 13 do not fit a KV region of 13"):
        cases.run(bad, ReferenceBackend())
    attn = cases.windowed("bad", 2, (90, 101), 1, "f32", None)
    with pytest.raises(RequestError, match="reads cells 90 to 100 of 100"):
        cases.run(attn, ReferenceBackend())
    embed = _by_name("embed/F32")
    bad = Case(embed.name, embed.op, (cases.Value((2,), integers=(0, 37)),), "exact")
    with pytest.raises(RequestError, match="token ids 0 to 37 do not fit the 37 rows"):
        cases.run(bad, ReferenceBackend())


def test_rows_move_verbatim_even_where_they_overlap() -> None:
    for fmt in ("f32", "q8_0"):
        for source, target in ((0, 2), (4, 1)):
            backend = ReferenceBackend(fmt)
            region = backend.add_kv_region(0, 12, 32, backend.kv_format)
            raw = np.random.default_rng(0).integers(0, 256, region.k.shape, np.uint8)
            region.k[:], region.v[:] = raw, raw[::-1]
            backend.copy_rows([(source, target, 6)])
            for side, before in ((region.k, raw), (region.v, raw[::-1])):
                want = [bytes(row) for row in before.reshape(12, -1)]
                moved = want[source : source + 6]
                want[target : target + 6] = moved
                assert [bytes(row) for row in side.reshape(12, -1)] == want
