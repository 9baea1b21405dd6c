"""The engine: splits over two devices, overflow, bad values, memory and traces."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers import TINY, TINY_MODELS, edited, f32, open_engine
from minfer import backends
from minfer.backends.reference import ReferenceBackend
from minfer.engine.engine import N_BATCH
from minfer.engine.place import place
from minfer.errors import (
    ContextOverflowError,
    DeviceMemoryError,
    NumericsError,
    RequestError,
    UnsupportedError,
)
from minfer.gguf import open_model
from minfer.gguf.writer import Tensor
from minfer.graph import Node, Placement, ir
from minfer.models import load_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDS = list(range(1, 20))


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A second device, with memory of its own."""

    def other(kv_format: str) -> ReferenceBackend:
        return ReferenceBackend(kv_format, name="other")

    monkeypatch.setitem(backends.DEVICES, "other", other)
    return


def _logits(name: str, placement: Placement | None = None, kv_format: str = "f32") -> np.ndarray[Any, Any]:
    engine = open_engine(TINY / f"{name}.gguf", placement=placement, kv_format=kv_format)
    first = engine.prefill(IDS)
    return np.stack([first, engine.prefill([3]), engine.prefill([4, 5])])


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_any_placement_gives_the_same_bits(name: str) -> None:
    n = load_architecture(open_model(TINY / f"{name}.gguf")).n_layer
    whole = _logits(name)
    for placement in (
        Placement("other", tuple(("reference", "other")[i % 2] for i in range(n)), "reference"),
        Placement("reference", ("other",) + ("reference",) * (n - 1), "other"),
        Placement("reference", ("reference",) * n, "other"),
    ):
        assert np.array_equal(_logits(name, placement), whole)


@pytest.mark.usefixtures("two_devices")
def test_each_device_holds_its_own_layers() -> None:
    placement = Placement("reference", ("other", "reference", "other"), "reference")
    engine = open_engine(TINY / "qwen3.gguf", placement=placement)
    assert sorted(engine.backends["other"].regions) == [0, 2]
    assert sorted(engine.backends["reference"].regions) == [1]
    engine.prefill(IDS)
    names = set(engine.backends["other"]._dense)
    assert names
    assert all(name.startswith(("blk.0.", "blk.2.")) for name in names)


def test_two_engines_with_different_kv_formats() -> None:
    """Nothing about KV is process-wide: each engine gives what it gives alone."""
    alone = {fmt: _logits("qwen3", kv_format=fmt) for fmt in ("f32", "f16", "q8_0")}
    engines = {fmt: open_engine(TINY / "qwen3.gguf", kv_format=fmt) for fmt in alone}
    together: dict[str, list[Any]] = {fmt: [] for fmt in alone}
    for batch in (IDS, [3], [4, 5]):
        for fmt, engine in engines.items():
            together[fmt].append(engine.prefill(batch))
    for fmt, rows in together.items():
        assert np.array_equal(np.stack(rows), alone[fmt])
    assert not np.array_equal(alone["f32"], alone["q8_0"])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_prompt_in_batches_is_the_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_engine(TINY / f"{name}.gguf").prefill(IDS)
    monkeypatch.setattr("minfer.engine.engine.N_BATCH", 5)
    engine = open_engine(TINY / f"{name}.gguf")
    parts = engine.prefill(IDS)
    assert engine.cache.built == 2, "full batches, and the rest"
    assert engine.cells.tokens == IDS
    assert np.abs(parts - whole).max() < 1e-5


def test_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread is refused while a step runs; closing waits for its end."""
    engine = open_engine(TINY / "qwen3.gguf", n_ctx=32)
    engine.prefill([1, 2])
    inside, go_on, order = threading.Event(), threading.Event(), []
    program = engine.cache.get(engine.params(1)).programs[0]
    original = program.run

    def slow() -> None:
        inside.set()
        assert go_on.wait(60)
        original()
        order.append("step")

    monkeypatch.setattr(program, "run", slow)
    with ThreadPoolExecutor(2) as others:
        step = others.submit(engine.prefill, [3])
        assert inside.wait(60)
        with pytest.raises(RequestError, match="runs a step on another thread"):
            engine.prefill([4])
        closing = others.submit(lambda: (engine.close(), order.append("closed")))
        go_on.set()
        step.exception()  # its result may be read before or after the end
        closing.result()
    assert order == ["step", "closed"]


def test_an_overflow_is_refused_before_anything_runs() -> None:
    engine = open_engine(TINY / "qwen3.gguf", n_ctx=16)
    with pytest.raises(ContextOverflowError, match="19 tokens do not fit: the context has 16 cells and 0 are in use"):
        engine.prefill(IDS)
    assert engine.cache.built == 0
    engine.prefill(IDS[:16])
    with pytest.raises(ContextOverflowError, match="1 tokens do not fit: the context has 16 cells and 16 are in use"):
        engine.prefill([1])


@pytest.mark.parametrize(("tokens", "message"), [([], "no tokens"), ([0, 96], "token id 96"), ([-1], "token id -1")])
def test_tokens_that_are_none_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        open_engine(TINY / "qwen3.gguf").prefill(tokens)


def test_bad_values_name_the_first_node_that_has_them(tmp_path: Path) -> None:
    def poison(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        values = np.ones((72, 40), np.float32)
        values[7, 3] = np.nan
        t["blk.1.ffn_up.weight"] = Tensor.of("blk.1.ffn_up.weight", values)

    engine = open_engine(edited(TINY / "qwen3.gguf", tmp_path / "nan.gguf", poison))
    with pytest.raises(NumericsError) as raised:
        engine.prefill(IDS)
    text = str(raised.value)
    assert text.startswith("blk.1.ffn_act (Project on reference, blk.1.ffn_gate.weight, blk.1.ffn_up.weight")
    assert "19 NaN or Inf of 1,368 values" in text
    engine.cells.truncate(0)
    with pytest.raises(NumericsError, match=r"blk\.1\.ffn_act \(Project on reference"):
        engine.prefill_best(IDS, 1)


def test_an_overflow_in_a_packed_kv_row_names_the_node(tmp_path: Path) -> None:
    def grow(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        t["blk.2.attn_v.weight"] = Tensor.of("blk.2.attn_v.weight", np.full((64, 40), 1e5, np.float32))

    engine = open_engine(edited(TINY / "qwen3.gguf", tmp_path / "big.gguf", grow), kv_format="f16")
    with pytest.raises(NumericsError, match=r"blk\.2\.rope_store: .*beyond the range of f16"):
        engine.prefill(IDS)


def test_the_best_logits_are_those_of_all() -> None:
    engine = open_engine(TINY / "qwen3.gguf")
    logits = engine.forward(IDS, engine.cells.rows(len(IDS)), 3)
    for k in (1, 5, 96):
        rows = engine.forward_best(IDS, engine.cells.rows(len(IDS)), 3, k)
        for row, best in zip(logits, rows, strict=True):
            order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
            assert best.ids.tolist() == order
            assert best.logits.tolist() == [row[i] for i in order]
            assert best.log_sum == pytest.approx(np.log(np.exp(row.astype(np.float64)).sum()))


def test_a_zero_gain_is_not_an_error(tmp_path: Path) -> None:
    def silence(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        t["output_norm.weight"] = f32("output_norm.weight", 40)

    engine = open_engine(edited(TINY / "qwen3.gguf", tmp_path / "zero.gguf", silence))
    assert not engine.prefill(IDS).any()


def test_a_trace_has_every_node_and_changes_nothing() -> None:
    engine = open_engine(TINY / "gemma3.gguf")
    rows = engine.cells.rows(len(IDS))
    logits = engine.forward(IDS, rows, n_outputs=1)
    traced = list(engine.trace(IDS, rows, 1))
    plan = engine.plan(len(IDS), 1)
    assert [n.name for n, _ in traced] == [n.name for n in plan.graph if not isinstance(n.op, ir.Input)
                                           and n.dtype != "none"]  # fmt: skip
    assert np.array_equal(traced[-1][1], logits)
    assert all(value.shape == node.shape[::-1] for node, value in traced)


class _Small(ReferenceBackend):
    def memory(self) -> tuple[int, int] | None:
        return 300_000, 1_000_000


class _Unknown(ReferenceBackend):
    def memory(self) -> tuple[int, int] | None:
        return None


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.DEVICES, "small", lambda kv: _Small(kv, name="small"))
    with pytest.raises(DeviceMemoryError) as raised:
        open_engine(TINY / "qwen3.gguf", device="small", n_ctx=1024)
    text = str(raised.value)
    # qwen3: 3 layers of K and V, 64 values a row
    assert f"KV cache {2 * 3 * 64 * 4 * 1024:,}" in text
    assert "small has 300,000 bytes free of 1,000,000" in text
    with open_model(TINY / "qwen3.gguf") as model:
        assert f"weights {sum(tensor.nbytes for tensor in model.tensors.values()):,}" in text
    assert "n_ctx" in text


def test_memory_that_cannot_be_told_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.DEVICES, "unknown", lambda kv: _Unknown(kv, name="unknown"))
    engine = open_engine(TINY / "qwen3.gguf", device="unknown")
    assert np.isfinite(engine.prefill(IDS)).all()


class _NoRope(ReferenceBackend):
    def supports(self, node: Node) -> str | None:
        return "it has no rope kernel" if isinstance(node.op, ir.Rope) else super().supports(node)


def test_a_device_named_refuses_and_auto_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = load_architecture(open_model(TINY / "qwen3.gguf"))
    devices = {"norope": lambda kv: _NoRope(kv, name="norope"), **backends.DEVICES}
    monkeypatch.setattr(backends, "DEVICES", devices)
    monkeypatch.setattr("minfer.engine.place.AUTO", ("norope", "reference"))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.q_roped: Rope cannot run on norope: it has no rope kernel"):
        place(arch, "norope", "f32")
    assert place(arch, "auto", "f32").devices != ("norope",)
    monkeypatch.setattr("minfer.engine.place.AUTO", ("norope",))
    with pytest.raises(UnsupportedError, match=r"no device here runs this model:\n  norope: blk\.0\.q_roped"):
        place(arch, "auto", "f32")
    with pytest.raises(UnsupportedError, match="no device named 'tpu'; expected auto or one of norope"):
        place(arch, "tpu", "f32")


def test_a_batch_is_bounded() -> None:
    assert N_BATCH <= 512
