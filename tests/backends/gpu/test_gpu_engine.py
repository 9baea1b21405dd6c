"""Whole models on the simulator: against the recorded values, fused and unfused, replayed, in every KV format."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gpu_cases
import numpy as np
import pytest

from helpers import TINY, TINY_MODELS, open_engine, span_rows
from minfer import backends, cases
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.launch import barriers, prove_ordered
from minfer.graph.fuse import FUSIONS
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from minfer.backends.gpu.launch import Launch
    from minfer.engine.engine import Engine

#: Of the logits of a tiny random model, whose spread is about 1: f32 sums in another order.
TOLERANCE = 1e-4
IDS = list(range(1, 20))


def simulate(name: str, **options: Any) -> Engine:
    return open_engine(TINY / f"{name}.gguf", device="simulator", **options)


def gpu(engine: Engine) -> GpuBackend:
    backend = engine.backends["simulator"]
    assert isinstance(backend, GpuBackend)
    return backend


def launches(engine: Engine, n_tokens: int = 1) -> list[Launch]:
    plan = engine.plan(n_tokens)
    return [launch for split in plan.splits for launch in gpu(engine).lower(plan, split)[1]]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_the_recorded_ones(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    ids = recorded["ids"].tolist()
    engine = simulate(name)
    logits = engine.forward(ids, engine.cells.rows(len(ids)), n_outputs=len(ids))
    assert all(node.device == "simulator" for node in engine.plan(len(ids)).graph)
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", [n for n in TINY_MODELS if "far_positions" in np.load(TINY / f"{n}.npz")])
def test_positions_far_apart_in_a_span_window(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    positions = recorded["far_positions"].tolist()
    engine = simulate(name)
    logits = engine.forward(recorded["far_ids"].tolist(), span_rows(positions), n_outputs=len(positions))
    assert np.abs(logits - recorded["far_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("n_tokens", [1, 3, 9])
def test_fused_and_unfused_give_the_same_bits(name: str, n_tokens: int) -> None:
    results = []
    for unfused in (frozenset(), frozenset(rule.name for rule in FUSIONS)):
        engine = simulate(name, unfused=unfused)
        first = engine.forward(IDS[:n_tokens], engine.cells.rows(n_tokens), n_outputs=n_tokens)
        engine.cells.commit(IDS[:n_tokens])
        results.append(np.concatenate([first, engine.prefill([5])[None]]))
        assert (sum(engine.plan(n_tokens, n_tokens).fused.values()) == 0) == bool(unfused)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-llama3rope"])
def test_a_decode_step_has_few_launches(name: str) -> None:
    """At most 7 a layer, attention split and combined, and 5 outside."""
    engine = simulate(name, n_ctx=1024)
    names = [launch.node for launch in launches(engine)]
    for layer in range(engine.arch.n_layer):
        assert sum(n.startswith(f"blk.{layer}.") for n in names) == 7
    assert sum(not re.match(r"blk\.", n) for n in names) <= 5


def test_a_decode_step_lowers_and_records_once() -> None:
    engine = simulate("qwen3")
    engine.prefill(IDS)
    engine.prefill([3])
    before = gpu(engine).lowered, gpu(engine).device.encoded
    for token in (4, 5, 6):
        engine.prefill([token])
    device = gpu(engine).device
    assert (gpu(engine).lowered, device.encoded) == before
    assert device.recorded == 1


@pytest.mark.parametrize("kv_format", ["f16", "q8_0"])
def test_packed_kv_rows_agree_with_the_reference(kv_format: str) -> None:
    """The rows round alike, so the classes of f16 and q8_0 do not add to that of f32 sums; a code may differ by one."""
    results = {}
    for device in ("reference", "simulator"):
        engine = open_engine(TINY / "qwen3.gguf", device=device, kv_format=kv_format)
        results[device] = np.stack([engine.prefill(IDS), engine.prefill([7])])
    spread = results["reference"].std()
    assert np.abs(results["simulator"] - results["reference"]).max() < (1e-3 if kv_format == "f16" else 2e-2) * spread


def test_chunked_and_whole_prefill_agree() -> None:
    whole = simulate("gemma3").prefill(IDS)
    engine = simulate("gemma3")
    for start in range(0, len(IDS), 5):
        parts = engine.prefill(IDS[start : start + 5])
    assert np.abs(parts - whole).max() < 1e-4


def test_the_same_prompt_twice_and_after_another_gives_the_same_bits() -> None:
    engine = simulate("qwen2")
    results = []
    for ids in (IDS, IDS[:6], IDS, IDS):
        engine.cells.truncate(0)
        results.append(engine.prefill(ids))
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[0], results[3])


def test_two_engines_with_different_formats_do_not_meet() -> None:
    alone = {f: simulate("qwen3", kv_format=f).prefill(IDS) for f in ("f32", "q8_0")}
    engines = {f: simulate("qwen3", kv_format=f) for f in ("f32", "q8_0")}
    for f, engine in engines.items():
        engine.prefill(IDS[:4])
        for other in engines.values():
            other.cells.truncate(0)
        for g, other in engines.items():
            assert np.array_equal(other.prefill(IDS), alone[g]), (f, g)
            other.cells.truncate(0)


def test_weights_are_bound_where_the_file_is_mapped() -> None:
    engine = simulate("qwen2")
    backend = gpu(engine)
    for name in engine.file.tensors:
        if name in backend._weights:
            buffer, offset = backend._weights[name]
            assert buffer.address + offset == engine.file.data(name).ctypes.data
    assert {w.name for node in engine.plan().graph for w in node.weights} <= set(backend._weights)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("n_tokens", [1, 4, 20])
def test_every_plan_is_ordered(name: str, n_tokens: int) -> None:
    found = launches(simulate(name, n_ctx=1024), n_tokens)
    fences = barriers(found)
    prove_ordered(found, fences)
    assert sum(fences) < len(found)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", FORMATS)
def test_a_matrix_vector_product_reads_each_weight_byte_once(type_: str) -> None:
    case = next(c for c in cases.all_cases() if c.name.startswith(f"matmul/{type_}/") and c.name.endswith("/n1"))
    backend = gpu_cases.backend(case, check=True)
    cases.run(case, backend)
    ((step, report),) = backend.device.reports
    (weight,) = [b for b in step.bound if b.slot == 3]
    assert report.counters.read_distinct[3] == weight.end - weight.start
    assert report.counters.read[3] <= 1.05 * (weight.end - weight.start)


def test_a_decode_step_reads_weights_and_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes from matrices and KV buffers: at most 1.05 of the matrices and the rows in the window, each once."""
    devices = []

    def checked(kv_format: str) -> GpuBackend:
        devices.append(SimulatorDevice(check=True))
        return GpuBackend(devices[-1], kv_format)

    monkeypatch.setitem(backends.DEVICES, "simulator", checked)
    engine = simulate("qwen3", kv_format="f16")
    engine.prefill(IDS[:12])
    device = gpu(engine).device
    device.reports.clear()
    engine.prefill([5])
    read = used = 0
    seen = set()
    rows = 0
    for step, report in device.reports:
        for binding in step.launch.bindings:
            if binding.ref.space == "weight":
                if binding.ref not in seen and step.launch.kernel.startswith("project"):
                    used += binding.nbytes
                    seen.add(binding.ref)
                gains = binding.nbytes < 1024  # of a few hundred bytes, read by each group: not counted as weights
                read += 0 if gains or step.launch.kernel == "embed" else report.counters.read[binding.slot]
            elif binding.ref.space in "kv" and not binding.writes:
                read += report.counters.read[binding.slot]
                rows += 13 * gpu(engine).regions[int(binding.ref.key)].row_bytes
    used -= sum(b.nbytes for s, _ in device.reports for b in s.launch.bindings if b.ref in seen and b.nbytes < 1024)
    assert 0 < rows < used
    assert used + rows <= read <= 1.05 * (used + rows)


# --- the best logits ---------------------------------------------------------------------------------------------


def test_only_the_best_logits_leave_the_device() -> None:
    engine = simulate("gemma3")
    logits = engine.forward(IDS, engine.cells.rows(len(IDS)), 3)
    for row, best in zip(logits, engine.forward_best(IDS, engine.cells.rows(len(IDS)), 3, 7), strict=True):
        assert best.ids.tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:7]
        assert best.logits.tolist() == row[best.ids].tolist()
        assert best.log_sum == pytest.approx(np.log(np.exp(row.astype(np.float64)).sum()), abs=1e-5)


def test_an_id_feeds_the_next_step_on_the_device() -> None:
    """The ids of a greedy answer by copies from the value that chose them, against ids that pass through the host."""
    engine = simulate("qwen3")
    engine.prefill(IDS)
    first = int(engine.prefill_best([5], 1).ids[0])
    expected = int(engine.prefill_best([first], 1).ids[0])
    engine.cells.truncate(len(IDS))
    engine.prefill_best([5], 1)
    backend, compiled = gpu(engine), engine.cache.get(engine.params(1, top_k=1))
    graph = compiled.plan.graph
    buffers = {
        node.name: engine.allocator.buffer(compiled.plan.slot(node)) for node in (*graph.nodes[:3], graph.nodes[-1])
    }
    rows = engine.cells.rows(1)
    backend.copy(buffers["top_k"], buffers["token_ids"], 4)
    backend.write(buffers["positions"], rows.positions)
    backend.write(buffers["cells"], rows.cells)
    for program in compiled.programs:
        program.run()
    assert int(backend.read(buffers["top_k"], 4).view(np.int32)[0]) == expected
