"""Threads, neighbours in a batch, hostile inputs, and what is left behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading

import numpy as np
import pytest
from native import ISAS, run

from helpers import TINY, TINY_MODELS, open_engine
from minfer import cases
from minfer.backends import DEVICES, open_backend
from minfer.backends.cpu import CpuBackend, _native, default_threads
from minfer.cases import Case, KvFill, Value
from minfer.errors import NumericsError, RequestError
from minfer.graph import ir
from minfer.graph.ir import Weight
from minfer.kv import Rows

CASES = cases.all_cases()


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    for case in CASES:
        one, *more = (run(case, threads=n) for n in (1, 2, 7))
        for other in more:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)), case.name  # NaN too


def long_attention(queries: int, n_ctx: int = 3000) -> Case:
    op = ir.Attn(0, 6, 2, 64, 0.125)
    spans = tuple(v for i in range(queries) for v in (7 * i, n_ctx - 11 * i))
    kv = KvFill(128, n_ctx, tuple(range(n_ctx)), "f16")
    inputs = (Value((384, queries)), Value((queries,), integers=(0,) * queries), Value((2 * queries,), integers=spans))
    return Case(f"long/{queries}", op, inputs, "attention", kv, 2)


@pytest.mark.parametrize("queries", [1, 3, 8, 9])
def test_a_long_context_cut_into_parts(queries: int) -> None:
    case = long_attention(queries)
    one, seven = (run(case, threads=n)[0] for n in (1, 7))
    assert np.array_equal(one, seven)
    (want,) = cases.run(case, open_backend("reference", "f16"))
    assert cases.error(one, want) < 1e-4


@pytest.mark.parametrize("n", [2, 12, 40])
def test_neighbours_in_a_batch_leave_no_trace(n: int) -> None:
    """A token's result is the same bits whatever the other tokens and their windows are."""
    rng = np.random.default_rng(n)
    weight = Weight("w.weight", "Q4_K", (512, 48))
    for op, width in ((ir.MatMul(weight), 512), (ir.Attn(0, 4, 2, 64, 0.125, None, None), 256)):
        kv = KvFill(128, 400, tuple(range(400))) if isinstance(op, ir.Attn) else None
        kept = n // 2
        results = []
        for seed in range(2):
            x = rng.standard_normal((n, width)).astype(np.float32) * 3
            x[kept] = np.linspace(-1, 1, width)
            spans = rng.integers(0, 200, (n, 2))
            spans[:, 1] += 200 if seed else 1
            spans[kept] = 100, 333
            inputs = [Value((width, n))]
            if kv:
                inputs += [Value((n,), integers=(0,) * n), Value((2 * n,), integers=tuple(map(int, spans.reshape(-1))))]
            case = Case(f"neighbours/{type(op).__name__}", op, tuple(inputs), "matmul", kv, 2 if kv else 0)
            data = {**case.data(), "x0": x}
            object.__setattr__(case, "data", lambda seed=0, data=data: data)
            results.append(run(case)[0][kept])
        assert np.array_equal(*results), type(op).__name__


def test_a_row_that_another_query_may_not_see_does_not_reach_it() -> None:
    """NaN in rows outside a query's window, inside its neighbour's."""
    case = named("attn/prefill65")
    clean = run(case)[0]
    data = case.data()
    data["kv_v"][40:] = np.nan
    data["kv_k"][40:] = np.nan
    object.__setattr__(dirty := dataclasses.replace(case), "data", lambda seed=0: data)
    got = run(dirty)[0]
    assert np.array_equal(got[:40], clean[:40])
    assert np.isnan(got[40:]).all()


def ranked_products(
    type_: str, n_in: int, n_out: int, n: int, k: int, isa: str, threads: int, *, equal: int = 1
) -> list[bytes]:
    """The `k` best of products, made and ranked by two operations, and by one."""
    weight = Weight("w.weight", type_, (n_in, n_out))
    case = Case("ranked", ir.MatMul(weight), (Value((n_in, n)),), "matmul")
    x = case.data()["x0"].view(np.uint8).reshape(-1)
    raw = case.weights()[weight.name].reshape(-1)
    rows = raw.reshape(n_out, -1)
    rows[-equal:] = rows[0]
    matrix = _native.matrix(type_, raw, n_in, n_out)
    space = CpuBackend(threads=threads, isa=isa).workspace
    results = []
    for joined in (False, True):
        program, logits = _native.Program(space), np.zeros(4 * n * n_out, np.uint8)
        out = np.zeros(4 * n * (2 * k + 1), np.uint8)
        last = out if joined else logits
        program.project("logits", x, n, [matrix], None, 0.0, "none", [], None, k if joined else 0, last)
        if not joined:
            program.top_k("top_k", logits, n_out, n, k, out)
        for _ in range(2):  # a program may run again
            program.run()
        results.append(out.tobytes())
    values = logits.view(np.float32)
    assert not values.any(), "only the best are written"
    return results


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize(("n_out", "k"), [(1, 1), (37, 37), (128, 3), (1100, 40)])
def test_ranked_products_are_those_of_two_operations(type_: str, n_out: int, k: int, isa: str) -> None:
    for n in (1, 2, 9, 130):
        one, *others = (r for t in (1, 3) for r in ranked_products(type_, 256, n_out, n, k, isa, t))
        assert all(other == one for other in others), n


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 9])
def test_of_equal_products_the_first_rows_are_the_best(n: int, threads: int) -> None:
    """A thread meets rows out of their order: those of four runs in turn."""
    for words in ranked_products("Q8_0", 64, 1100, n, 300, "", threads, equal=1100):
        ids = np.frombuffer(words, np.int32).reshape(n, 601)[:, :300]
        assert np.array_equal(ids, np.tile(np.arange(300), (n, 1)))


def test_logits_are_ranked_where_they_are_made() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cpu")
    logits = engine.forward([1, 5, 9], engine.cells.rows(3), 2)
    best = engine.forward_best([1, 5, 9], engine.cells.rows(3), 2, 7)
    for row, found in zip(logits, best, strict=True):
        order = np.argsort(-row, kind="stable")[:7]
        assert np.array_equal(found.ids, order)
        assert np.array_equal(found.logits, row[order])
        assert found.log_sum == pytest.approx(np.log(np.exp(row.astype(np.float64)).sum()), rel=1e-6)
    plain, ranked = (engine.cache.get(engine.params(3, 2, top_k=k)).programs[0].counts for k in (None, 7))
    assert ranked == plain  # the ranking is no operation of its own
    engine.close()


# --- hostile inputs ----------------------------------------------------------------------------------------------


def with_integers(name: str, which: int, values: tuple[int, ...]) -> Case:
    case = named(name)
    inputs = list(case.inputs)
    inputs[which] = Value((len(values),), integers=values)
    return dataclasses.replace(case, inputs=tuple(inputs))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (with_integers("embed/Q4_0", 0, (0, 36, -1, 2, 3)), r"token id -1 \(number 2\) is outside 0 to 36"),
        (with_integers("embed/Q4_0", 0, (0, 36, 37, 2, 3)), r"token id 37 \(number 2\) is outside 0 to 36"),
        (with_integers("get_rows", 1, (8, 9, 4)), r"row 9 \(number 1\) is outside 0 to 8"),
        (with_integers("kv_store/f16/96x3", 2, (4, 13, 7)), "layer 0: cell 13 does not fit a KV region of 13"),
        (with_integers("kv_store/f16/96x3", 2, (4, -1, 7)), "layer 0: cell -1 does not fit"),
        (with_integers("attn/decode33", 1, (2**31 - 1,)), "query 0 reads cells 0 to 2147483647 of 33"),
        (with_integers("attn/span/f32/full", 2, (3, 20, 40, 101, 0, 1, 0, 0)), "query 1 reads cells 40 to 100 of 100"),
        (with_integers("attn/span/f32/full", 2, (-1, 20, 40, 50, 0, 1, 0, 0)), "query 0 reads cells -1 to 19 of 100"),
        (with_integers("attn/map/f32/full", 2, (80, 21) + (0,) * 22), "query 0 reads cells 80 to 100 of 100"),
        (with_integers("attn/map/f32/full", 2, (2**31 - 1, 2**31 - 1) + (0,) * 22), "query 0 reads cells"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_indices_out_of_range_are_refused(case: Case, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(case)


def test_nothing_is_written_before_an_input_is_refused() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cpu")
    engine.prefill([1, 2, 3])
    before = [bytes(r.k) + bytes(r.v) for r in engine.backends["cpu"].regions.values()]
    bad = Rows(np.array([3], np.int32), np.array([64], np.int32), np.zeros(0, np.int32), 0)
    with pytest.raises(RequestError, match="cell 64 does not fit a KV region of 64"):
        engine.forward([5], bad, 1)
    assert [bytes(r.k) + bytes(r.v) for r in engine.backends["cpu"].regions.values()] == before
    engine.close()


def test_a_cell_written_twice_keeps_the_later_row() -> None:
    case = named("kv_store/f32/256x9")
    cells = (3, 4, 5, 3, 6, 7, 3, 8, 4)
    twice = with_integers(case.name, 2, cells)
    for _ in range(5):
        k, v = run(twice, threads=4)
        for x, rows in ((twice.data()["x0"], k), (twice.data()["x1"], v)):
            assert np.array_equal(rows[3], x[6])
            assert np.array_equal(rows[4], x[8])


@pytest.mark.parametrize(("fmt", "value"), [("f16", 7e4), ("q8_0", np.inf), ("q8_0", np.nan), ("q8_0", 1e9)])
def test_a_value_that_a_kv_format_cannot_hold_is_an_error(fmt: str, value: float) -> None:
    case = named(f"kv_store/{fmt}/96x3")
    data = case.data()
    data["x1"][1, 5] = value
    object.__setattr__(case := dataclasses.replace(case), "data", lambda seed=0: data)
    with pytest.raises(NumericsError, match="run with the KV format f32"):
        run(case)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 9])
def test_nan_and_inf_are_not_rounded_away(value: float, n: int) -> None:
    case = named(f"matmul/Q4_0/96x37/n{n}")
    data = case.data()
    data["x0"][0, 40] = value
    object.__setattr__(case := dataclasses.replace(case), "data", lambda seed=0: data)
    (got,) = run(case)
    assert not np.isfinite(got[0]).any()
    assert np.isfinite(got[1:]).all()


# --- the backend -------------------------------------------------------------------------------------------------


def test_it_is_the_device_that_auto_takes_first_on_a_machine_without_a_gpu() -> None:
    names = list(DEVICES)
    assert names.index("cpu") < names.index("reference")
    assert open_backend("cpu", "f32").name == "cpu"


def test_weights_take_no_memory_beyond_the_file() -> None:
    engine = open_engine(TINY / "gemma3.gguf", device="cpu")
    weights = {w for node in engine.plan().graph for w in node.weights}
    assert {engine.backends["cpu"].weight_bytes(w) for w in weights} == {0}
    engine.close()


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_CPU", "sse9")
    with pytest.raises(RequestError, match="no CPU kernels named 'sse9' here: expected one of portable"):
        CpuBackend()
    monkeypatch.setenv("MINFER_CPU", "portable")
    assert CpuBackend().workspace.isa == "portable"


def test_threads_are_chosen_and_bounded() -> None:
    assert CpuBackend(threads=3).workspace.threads == 3
    assert CpuBackend().workspace.threads == default_threads()
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    for wrong in (0, 5000):
        with pytest.raises(RequestError, match=f"threads is {wrong}, expected 1 to 1024"):
            CpuBackend(threads=wrong)


def test_a_head_without_a_kernel_is_refused_by_name() -> None:
    node = ir.Node(0, "blk.0.attn", ir.Attn(0, 2, 1, 60, 1.0), (), (120, 1), "f32", 0, "cpu")
    assert CpuBackend().supports(node) == "a head of 60 values; it needs a multiple of 8 up to 512"


def test_one_crossing_a_step_and_few_barriers() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cpu")
    engine.prefill([1])
    compiled = engine.cache.get(engine.params(1, 1))
    operations, barriers = compiled.programs[0].counts
    nodes = len(compiled.plan.splits[0].nodes)
    assert len(compiled.programs) == 1
    assert operations == nodes + 1  # and the table of rotary angles
    assert barriers < operations  # the table and the embedding run side by side
    engine.close()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_agree_with_the_oracle(name: str) -> None:
    """Their weights are F32: f32 arithmetic in another order."""
    tokens = [1, 5, 9, 2, 7, 3, 8, 4, 6, 1, 2]
    logits = []
    for device in ("cpu", "reference"):
        engine = open_engine(TINY / f"{name}.gguf", device=device)
        first = engine.forward(tokens, engine.cells.rows(len(tokens)), n_outputs=len(tokens))
        engine.cells.commit(tokens)
        logits.append(np.concatenate([first, engine.prefill([3])[None]]))
        engine.close()
    assert cases.error(logits[0], logits[1]) < 1e-3


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_prompt_in_batches_is_the_prompt_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches but the last only store rows: their plans have no logits."""
    prompt = list(range(3, 20))
    whole = open_engine(TINY / f"{name}.gguf", device="cpu").prefill(prompt)
    monkeypatch.setattr("minfer.engine.engine.N_BATCH", 5)
    batched = open_engine(TINY / f"{name}.gguf", device="cpu").prefill(prompt)
    assert cases.error(batched, whole) < 1e-3


def test_a_hundred_loads_leave_nothing_behind() -> None:
    def cycle() -> None:
        engine = open_engine(TINY / "qwen3.gguf", device="cpu", n_ctx=64)
        engine.prefill([1, 2, 3])
        engine.close()

    for _ in range(20):
        cycle()
    gc.collect()
    before, threads = resident(), threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        cycle()
    gc.collect()
    assert resident() - before < 4 << 20
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/task")) == tasks


def test_a_closed_backend_lets_go_of_its_programs() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cpu")
    engine.prefill([1, 2])
    program = engine.cache.get(engine.params(2, 1)).programs[0]
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        program.run()


def test_two_engines_on_two_threads_give_what_each_gives_alone() -> None:
    def answer() -> bytes:
        engine = open_engine(TINY / "gemma3.gguf", device="cpu")
        rows = [engine.prefill([1 + i, 2, 3]).tobytes() for i in range(10)]
        engine.close()
        return b"".join(rows)

    want = answer()
    got: list[bytes] = []
    workers = [threading.Thread(target=lambda: got.append(answer())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert got == [want] * 4
