"""Layers over two backends with memories of their own: the host's reference and the simulator."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers import TINY, TINY_MODELS, open_engine
from minfer import backends
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.engine.place import need, place
from minfer.errors import DeviceMemoryError, RequestError
from minfer.gguf import open_model
from minfer.graph import Graph, Node, Placement, ir
from minfer.graph.allocate import Allocator, splits_of
from minfer.graph.fuse import FUSIONS
from minfer.models import load_architecture

if TYPE_CHECKING:
    from minfer.models import Transformer

IDS = list(range(1, 14))
HOST, GPU = "reference", "simulator"


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands for the host: its sums are f32, so that two devices can be compared."""
    monkeypatch.setattr("minfer.engine.place.HOST", HOST)


def arch(name: str = "qwen3") -> Transformer:
    return load_architecture(open_model(TINY / f"{name}.gguf"))


def logits(name: str, placement: Placement, **options: Any) -> np.ndarray[Any, Any]:
    engine = open_engine(TINY / f"{name}.gguf", placement=placement, **options)
    devices = {node.device for node in engine.plan().graph if not isinstance(node.op, ir.Input)}
    assert devices == set(placement.devices)
    return np.stack([engine.prefill(IDS), engine.prefill([3]), engine.prefill([4, 5])])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_alternating_layers_agree_with_one_device(name: str) -> None:
    n = arch(name).n_layer
    whole = logits(name, Placement.whole(HOST, n))
    for first, second in ((HOST, GPU), (GPU, HOST)):
        layers = tuple((first, second)[i % 2] for i in range(n))
        for placement in (Placement(first, layers, layers[-1]), Placement(second, layers, first)):
            assert np.abs(logits(name, placement) - whole).max() < 1e-4


def test_a_store_takes_its_keys_from_another_backend() -> None:
    """K, V and q are made on the host; rows are stored and read on the GPU, and the result goes back."""
    engine = open_engine(TINY / "qwen3.gguf", unfused=frozenset(rule.name for rule in FUSIONS))
    graph = engine.arch.build(engine.params(3))
    on_gpu = (ir.KvStore, ir.Attn)

    def moved(node: Node) -> Node:
        device = GPU if isinstance(node.op, on_gpu) else HOST
        return Node(node.index, node.name, node.op, node.inputs, node.shape, node.dtype, node.layer, device)

    placed = Graph(graph.params, tuple(map(moved, graph.nodes)), graph.outputs)
    splits = splits_of(placed)
    receives = [placed.nodes[i].name for s in splits if s.device == GPU for i in s.receives]
    assert "blk.0.k_roped" in receives
    assert "blk.0.v" in receives
    # Run it: the engine's own loop over splits, with a backend for each device.
    gpu = GpuBackend(SimulatorDevice())
    host = backends.open_backend(HOST, "f32")
    engine.backends.update({GPU: gpu, HOST: host})
    weights = {w for node in placed for w in node.weights}
    host.load_weights(engine.file, sorted(weights, key=lambda w: w.name))
    gpu.load_weights(engine.file, [])
    for layer in range(engine.arch.n_layer):
        gpu.add_kv_region(layer, engine.n_ctx, engine.n_kv_values, gpu.kv_format)
    engine.allocator.devices = engine.backends
    slots = engine.allocator.place(placed, splits)
    plan = type(engine.plan())(placed, splits, slots, {})
    programs = tuple(engine._compile(plan, split) for split in splits)
    from minfer.graph.cache import Compiled

    engine.cache.get = lambda params: Compiled(plan, programs)
    got = engine.forward([5, 6, 7], engine.cells.rows(3), 1)
    want = open_engine(TINY / "qwen3.gguf").prefill([5, 6, 7])
    assert np.abs(got[0] - want).max() < 1e-4


def test_one_value_read_by_two_backends_is_copied_once() -> None:
    n = arch().n_layer
    layers = (HOST, GPU, HOST)[:n]
    engine = open_engine(TINY / "qwen3.gguf", placement=Placement(HOST, layers, HOST))
    plan = engine.plan()
    received = [(split.device, i) for split in plan.splits for i in split.receives]
    assert len(received) == len(set(received)) > 0
    positions = next(node for node in plan.graph if isinstance(node.op, ir.Input) and node.op.kind == "positions")
    assert {device for index, device in plan.slots if index == positions.index} == {HOST, GPU}


# --- how many layers ---------------------------------------------------------------------------------------------


class _Discrete(GpuBackend):
    """A device with a memory of its own: its weights are charged."""

    free = 0

    def weight_bytes(self, weight: ir.Weight) -> int:
        rows = int(np.prod(weight.shape[1:]))
        return 4 * rows * weight.shape[0]

    def memory(self) -> tuple[int, int] | None:
        return (self.free, 1 << 30) if self.free >= 0 else None


@pytest.fixture
def discrete(monkeypatch: pytest.MonkeyPatch) -> type[_Discrete]:
    monkeypatch.setitem(backends.DEVICES, GPU, lambda kv: _Discrete(SimulatorDevice(), kv))
    return _Discrete


def needed(count: int, n_ctx: int = 64) -> int:
    """Bytes that `count` layers take, from the plan."""
    a = arch()
    found = place(a, GPU, "f32", gpu_layers=count)
    engines = {d: backends.open_backend(d, "f32") for d in dict.fromkeys((GPU, HOST))}
    from minfer.graph import GraphParams
    from minfer.graph.plan import make_plan

    plan = make_plan(a.build, GraphParams(min(512, n_ctx), 1, found, "f32"), engines, Allocator(engines))
    return need(engines[GPU], a, plan, n_ctx).total


def test_auto_takes_the_longest_prefix_that_fits(discrete: type[_Discrete], monkeypatch: pytest.MonkeyPatch) -> None:
    a = arch()
    sizes = [needed(count) for count in range(1, a.n_layer + 1)]
    assert sizes == sorted(sizes)
    for count, size in enumerate(sizes, 1):
        for free, layers in ((size, count), (size - 1, count - 1)):
            monkeypatch.setattr(discrete, "free", free)
            placement = place(a, GPU, "f32", gpu_layers="auto", n_ctx=64)
            assert placement.layers.count(GPU) == layers
            assert placement.layers == (GPU,) * layers + (HOST,) * (a.n_layer - layers)


def test_an_unknown_memory_is_not_compared(discrete: type[_Discrete], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrete, "free", -1)
    a = arch()
    assert place(a, GPU, "f32", gpu_layers="auto", n_ctx=64) == Placement.whole(GPU, a.n_layer)
    open_engine(TINY / "qwen3.gguf", device=GPU)


def test_weights_are_charged_in_a_refusal(discrete: type[_Discrete], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrete, "free", needed(3) - 1)
    with pytest.raises(DeviceMemoryError, match=r"simulator has .* needs .*weights [1-9][\d,]+, KV cache [1-9]"):
        open_engine(TINY / "qwen3.gguf", device=GPU)


def test_the_parts_of_a_split_window_are_charged(discrete: type[_Discrete], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is charged is what steps of any size allocate, and the refusal names it."""
    monkeypatch.setattr(discrete, "free", -1)
    engine = open_engine(TINY / "qwen3.gguf", device=GPU, n_ctx=1024)
    backend = engine.backends[GPU]
    assert isinstance(backend, GpuBackend)
    charged = backend.scratch_bytes(engine.plan(512), 1024)
    taken = []
    for n in (1, 2, 8, 9, 40):
        plan = engine.plan(n)
        taken += [sum(backend.lower(plan, split)[0].scratch.values()) for split in plan.splits]
    assert max(taken) == charged == 4 * 8 * 4 * engine.arch.n_head * (engine.arch.head_dim + 2)  # 8 queries, 4 parts
    monkeypatch.setattr(discrete, "free", 1000)
    with pytest.raises(DeviceMemoryError, match=f"scratch {charged:,}"):
        open_engine(TINY / "qwen3.gguf", device=GPU, n_ctx=1024)


def test_inputs_as_halves_are_charged(discrete: type[_Discrete], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrete, "free", -1)
    engine = open_engine(TINY / "qwen3.gguf", device=GPU, n_ctx=1024)
    backend = engine.backends[GPU]
    assert isinstance(backend, GpuBackend)
    profile = dataclasses.replace(backend.device.profile, extra=frozenset(["mma"]))
    monkeypatch.setattr(backend.device, "profile", profile)
    parts = backend.scratch_bytes(engine.plan(8), 1024)
    charged = backend.scratch_bytes(engine.plan(40), 1024)
    plan = engine.plan(40)
    taken = sum(sum(backend.lower(plan, split)[0].scratch.values()) for split in plan.splits)
    widest = -(-max(w.shape[0] for node in plan.graph for w in node.weights if len(w.shape) == 2) // 64) * 64
    assert charged - parts == taken == 2 * widest * 128 + 4 * 40  # whole 128 tokens


@pytest.mark.parametrize("wrong", [-1, 4, "many"])
def test_a_count_that_no_model_has_is_refused(wrong: int | str) -> None:
    with pytest.raises(RequestError, match="expected 0 to 3 or auto"):
        place(arch(), GPU, "f32", gpu_layers=wrong)


def test_layers_for_a_gpu_that_is_not_there_are_refused() -> None:
    assert place(arch(), HOST, "f32", gpu_layers="auto") == Placement.whole(HOST, arch().n_layer)
    with pytest.raises(RequestError, match="gpu_layers is 2, but reference is no GPU"):
        place(arch(), HOST, "f32", gpu_layers=2)


def test_layers_beyond_the_prefix_keep_their_rows_on_the_host() -> None:
    placement = place(arch(), GPU, "f32", gpu_layers=2)
    assert placement == Placement(GPU, (GPU, GPU, HOST), HOST)
    engine = open_engine(TINY / "qwen3.gguf", placement=placement)
    assert sorted(engine.backends[GPU].regions) == [0, 1]
    whole = open_engine(TINY / "qwen3.gguf").prefill(IDS)
    assert np.abs(engine.prefill(IDS) - whole).max() < 1e-4
