"""The allocator: no two live values share a buffer, and nothing is kept that nobody needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from helpers import TINY, TINY_MODELS
from minfer.gguf import open_model
from minfer.graph import Graph, GraphParams, Placement, Plan, Weight, ir
from minfer.graph.allocate import Allocator, splits_of
from minfer.graph.builder import Builder
from minfer.graph.cache import GraphCache
from minfer.graph.plan import make_plan
from minfer.models import Transformer, load_architecture

if TYPE_CHECKING:
    from collections.abc import Callable


class Anything:
    """A device that runs every node, and memory that counts."""

    def __init__(self) -> None:
        self.held = 0

    def supports(self, node: ir.Node) -> None:
        return None

    def allocate(self, nbytes: int, label: str) -> bytearray:
        self.held += nbytes
        return bytearray(nbytes)

    def free(self, buffer: bytearray) -> None:
        self.held -= len(buffer)


def _arch(name: str) -> Transformer:
    return load_architecture(open_model(TINY / f"{name}.gguf"))


def _placement(arch: Transformer, how: str) -> Placement:
    n = arch.n_layer
    if how == "one":
        return Placement.whole("a", n)
    return Placement("a", tuple("ba"[i % 2] for i in range(n)), "b")


def _conflicts(plan: Plan) -> list[str]:
    """Values whose lives overlap in one buffer, found by running the schedule with a tag in every buffer.

    A buffer holds the name of the value last written to it; a node that reads finds out whether its input is still
    there. This is what execution does, without knowing how the allocator thinks.
    """
    holds: dict[int, int] = {}
    bad = []
    for (index, device), slot in plan.slots.items():
        node = plan.graph.nodes[index]
        if isinstance(node.op, ir.Input) and device in {
            plan.graph.nodes[i].device for i in plan.graph.consumers[index]
        }:
            holds[slot.buffer] = index
    for split in plan.splits:
        for index in split.receives:
            if holds.get(plan.slots[index, plan.graph.nodes[index].device].buffer) != index:
                bad.append(f"{index} was gone before it crossed to {split.device}")
            holds[plan.slots[index, split.device].buffer] = index
        for node in split.nodes:
            for source in node.inputs:
                if holds.get(plan.slots[source, split.device].buffer) != source:
                    bad.append(f"{node.name} reads {plan.graph.nodes[source].name}, which was overwritten")
            if node.dtype != "none":
                holds[plan.slots[node.index, split.device].buffer] = node.index
    for index in plan.graph.outputs:
        if holds.get(plan.slot(plan.graph.nodes[index]).buffer) != index:
            bad.append(f"output {index} was overwritten")
    return bad


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("how", ["one", "alternating"])
@pytest.mark.parametrize(("n_tokens", "n_outputs"), [(1, 1), (7, 1), (7, 7), (7, 0)])
@pytest.mark.parametrize("unfused", [frozenset(), frozenset({"glu", "project_qkv", "project_add", "project_norm"})])
def test_no_value_is_overwritten_while_it_is_needed(
    name: str, how: str, n_tokens: int, n_outputs: int, unfused: frozenset[str]
) -> None:
    arch, devices = _arch(name), {"a": Anything(), "b": Anything()}
    for trace in (False, True):
        params = GraphParams(n_tokens, n_outputs, _placement(arch, how), unfused=unfused, trace=trace)
        plan = make_plan(arch.build, params, devices, Allocator(devices))
        assert _conflicts(plan) == []
        for (index, device), slot in plan.slots.items():
            assert slot.nbytes == plan.graph.nodes[index].nbytes
            assert slot.device == device


def test_the_check_sees_a_wrong_slot() -> None:
    arch, devices = _arch("qwen2"), {"a": Anything()}
    plan = make_plan(arch.build, GraphParams(3, 3, _placement(arch, "one")), devices, Allocator(devices))
    residual, ffn = plan.graph.by_name["blk.0.attn_residual"], plan.graph.by_name["blk.0.ffn_act"]
    slots = dict(plan.slots)
    slots[ffn.index, "a"] = slots[residual.index, "a"]
    assert _conflicts(dataclasses.replace(plan, slots=slots))


def _plan(outputs: Callable[[Builder, ir.Node], tuple[ir.Node, ...]]) -> Plan:
    """The plan of a graph built from `x`, a value that is not an input."""

    def build(params: GraphParams) -> Graph:
        b = Builder(params)
        return b.finish(*outputs(b, b.silu(b.input("raw", (8, 1)), "x")))

    devices = {"a": Anything()}
    return make_plan(build, GraphParams(1, 1, Placement.whole("a", 1)), devices, Allocator(devices))


def test_an_output_that_is_read_again_keeps_its_buffer() -> None:
    plan = _plan(lambda b, x: (x, b.gelu(b.gelu(x, "y"), "z")))
    assert _conflicts(plan) == []


def test_a_value_read_whole_and_index_by_index_is_not_overwritten() -> None:
    """x W + x: every result needs all of x, so the sum must not take its place."""
    weight = Weight("w", "F32", (8, 8))
    plan = _plan(lambda b, x: (b.add(b.matmul(x, weight, "product"), x, "sum"),))
    assert plan.fused["project_add"] == 1
    x, total = plan.graph.by_name["x"], plan.graph.by_name["sum"]
    assert plan.slot(x).buffer != plan.slot(total).buffer
    apart = _plan(lambda b, x: (b.add(b.gelu(x, "y"), x, "sum"),))
    assert apart.slot(apart.graph.by_name["sum"]).buffer in (
        apart.slot(apart.graph.by_name["x"]).buffer,
        apart.slot(apart.graph.by_name["y"]).buffer,
    )


def test_a_traced_plan_keeps_every_value() -> None:
    arch, devices = _arch("gemma3"), {"a": Anything()}
    plan = make_plan(arch.build, GraphParams(2, 2, _placement(arch, "one"), trace=True), devices, Allocator(devices))
    buffers = [slot.buffer for slot in plan.slots.values()]
    assert len(set(buffers)) == len(buffers)


def test_memory_does_not_grow_with_layers() -> None:
    arch, devices = _arch("gemma3"), {"a": Anything()}
    plan = make_plan(arch.build, GraphParams(2, 2, _placement(arch, "one")), devices, Allocator(devices))
    values = sum(node.dtype == "f32" and not isinstance(node.op, ir.Input) for node in plan.graph)
    f32 = {s.buffer for (i, _), s in plan.slots.items() if not isinstance(plan.graph.nodes[i].op, ir.Input)}
    assert values > 60
    assert len(f32) <= 9


def test_splits_cut_where_the_device_changes() -> None:
    arch, devices = _arch("qwen3"), {"a": Anything(), "b": Anything()}
    plan = make_plan(arch.build, GraphParams(2, 2, _placement(arch, "alternating")), devices, Allocator(devices))
    assert [split.device for split in plan.splits] == ["a", "b", "a", "b"]
    names = [[plan.graph.nodes[i].name for i in split.receives] for split in plan.splits]
    assert names == [[], ["embed"], ["blk.0.ffn_residual"], ["blk.1.ffn_residual"]]
    assert splits_of(plan.graph) == plan.splits


def test_what_comes_before_the_first_layer_stays_with_the_embedding() -> None:
    arch, devices = _arch("gemma3"), {"a": Anything(), "b": Anything()}
    placement = Placement("a", ("b",) * arch.n_layer, "b")
    plan = make_plan(arch.build, GraphParams(2, 2, placement), devices, Allocator(devices))
    places = {node.name: node.device for node in plan.graph}
    assert (places["embed"], places["embed_scaled"], places["token_ids"]) == ("a", "a", "a")
    assert (places["positions"], places["logits"]) == ("b", "b")


def test_plans_share_buffers_and_the_last_user_frees_them() -> None:
    arch, memory = _arch("qwen3"), Anything()
    devices = {"a": memory}
    allocator = Allocator(devices)
    cache: GraphCache[int] = GraphCache(
        arch.build,
        devices,
        allocator,
        lambda plan, split: len([allocator.buffer(slot) for slot in plan.slots.values()]),
        capacity=2,
    )
    params = [GraphParams(n, 1, _placement(arch, "one")) for n in (1, 5, 9)]
    first = cache.get(params[0])
    one = memory.held
    assert one == first.plan.pool_bytes
    cache.get(params[1])
    both = memory.held
    assert one < both < first.plan.pool_bytes + cache.get(params[1]).plan.pool_bytes, "logits and inputs are shared"
    assert cache.get(params[0]) is first
    assert (cache.built, cache.reused) == (2, 2)
    cache.get(params[2])  # drops params[1], used least recently
    assert memory.held == allocator.nbytes("a")
    assert cache.get(params[0]) is first
    cache.get(params[1])
    assert cache.built == 4
    allocator.close()
    assert memory.held == 0


def test_equal_params_give_an_equal_graph() -> None:
    arch, devices = _arch("gemma3"), {"a": Anything()}
    params = GraphParams(4, 1, _placement(arch, "one"))
    again = dataclasses.replace(params)
    assert arch.build(params) == arch.build(again)
    allocator = Allocator(devices)
    other = make_plan(arch.build, GraphParams(9, 9, _placement(arch, "one")), devices, allocator)
    first, second = (make_plan(arch.build, p, devices, allocator) for p in (params, again))
    assert first.to_json() == second.to_json() != other.to_json()
    fresh = make_plan(arch.build, params, devices, Allocator(devices))
    assert fresh.to_json() == first.to_json(), "a plan does not depend on the plans before it"


def test_a_plan_that_does_not_compile_leaves_nothing_behind() -> None:
    arch, memory = _arch("qwen3"), Anything()
    allocator = Allocator({"a": memory})

    def fail(plan: Plan, split: object) -> int:
        for slot in plan.slots.values():
            allocator.buffer(slot)
        raise RuntimeError("no")

    cache: GraphCache[int] = GraphCache(arch.build, {"a": memory}, allocator, fail)
    with pytest.raises(RuntimeError):
        cache.get(GraphParams(1, 1, _placement(arch, "one")))
    assert memory.held == 0
    assert not allocator.pool
