"""Golden plans: which nodes and fusions every architecture gets. A fusion lost or won is a red test.

`python tests/graph/test_fuse.py` writes the golden file anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import DATA, TINY, TINY_MODELS
from minfer.gguf import open_model
from minfer.graph import Graph, GraphParams, Node, Placement, Plan, Weight, ir
from minfer.graph.allocate import Allocator
from minfer.graph.builder import Builder
from minfer.graph.fuse import FUSIONS, NORM_PROLOGUE_MAX_TOKENS, fuse
from minfer.graph.plan import make_plan
from minfer.models import load_architecture

GOLDEN = DATA / "golden_plans.json"
#: One token, the last count that takes a norm as prologue, the first that does not, and a batch without outputs.
STEPS = ((1, 1), (NORM_PROLOGUE_MAX_TOKENS, 1), (NORM_PROLOGUE_MAX_TOKENS + 1, 1), (16, 0))


class Runs:
    """A device that runs every node but the kinds named."""

    def __init__(self, *refused: type[ir.Op]) -> None:
        self.refused = refused

    def supports(self, node: Node) -> str | None:
        return "no" if isinstance(node.op, self.refused) else None

    def allocate(self, nbytes: int, label: str) -> Any:
        raise AssertionError("a plan takes no memory")

    def free(self, buffer: Any) -> None: ...


def plan_of(name: str, n_tokens: int, n_outputs: int, device: Runs, unfused: frozenset[str] = frozenset()) -> Plan:
    arch = load_architecture(open_model(TINY / f"{name}.gguf"))
    devices = {"a": device}
    params = GraphParams(n_tokens, n_outputs, Placement.whole("a", arch.n_layer), unfused=unfused)
    return make_plan(arch.build, params, devices, Allocator(devices))


def golden(name: str) -> dict[str, Any]:
    steps = {}
    for n_tokens, n_outputs in STEPS:
        plan = plan_of(name, n_tokens, n_outputs, Runs())
        nodes = [n for n in plan.graph if not isinstance(n.op, ir.Input)]
        steps[f"{n_tokens} tokens, {n_outputs} outputs"] = {
            "fused": dict(plan.fused),
            "nodes": [f"{n.name}: {_signature(n, plan.graph)}" for n in nodes],
        }
    return steps


def _signature(node: Node, graph: Graph) -> str:
    parts = [node.kind]
    if isinstance(node.op, ir.Project):
        parts.append("norm" if node.op.norm else "-")
        parts.append(node.op.epilogue)
        parts.append("+".join(w.name.split(".", 2)[-1].removesuffix(".weight") for w in node.op.segments))
    reads = ",".join(graph.nodes[i].name for i in node.inputs)
    return f"{' '.join(parts)} <- {reads}"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_plan(name: str) -> None:
    assert golden(name) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", [n for n in TINY_MODELS if n != "gemma3"])
def test_a_decode_layer_is_six_launches(name: str) -> None:
    plan = plan_of(name, 1, 1, Runs())
    assert [n.kind for n in plan.graph if n.layer == 0] == [
        "Project", "HeadRopeStore", "Attn", "Project", "Project", "Project",
    ]  # fmt: skip
    assert [n.kind for n in plan.graph if n.layer is None and not isinstance(n.op, ir.Input)] == ["Embed", "Project"]


@pytest.mark.parametrize("rule", [rule.name for rule in FUSIONS])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_rule_named_in_unfused_does_not_fire(name: str, rule: str) -> None:
    plan = plan_of(name, 1, 1, Runs(), frozenset({rule}))
    assert rule not in plan.fused


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_the_device_cannot_run_fused_stays_apart(name: str) -> None:
    fused = plan_of(name, 1, 1, Runs(ir.Project, ir.HeadRopeStore, ir.SwiGLU, ir.GeGLU))
    plain = plan_of(name, 1, 1, Runs(), frozenset(rule.name for rule in FUSIONS))
    assert sum(fused.fused.values()) == 0
    assert fused.graph.nodes == plain.graph.nodes
    only_rope = plan_of(name, 1, 1, Runs(ir.HeadRopeStore))
    assert only_rope.fused["project_qkv"] == 0
    assert "blk.0.q_roped" in only_rope.graph.by_name


# --- a fusion must not fire where a value it removes is needed ------------------------------------------------------

D = 8


def _w(name: str, *shape: int) -> Weight:
    return Weight(name, "F32", shape)


def _fused(b: Builder, *outputs: Node) -> dict[str, int]:
    graph = b.finish(*outputs)
    placed = Graph(graph.params, tuple(_on(n, "a") for n in graph), graph.outputs)
    return fuse(placed, {"a": Runs(), "b": Runs()})[1]


def _on(node: Node, device: str) -> Node:
    import dataclasses

    return dataclasses.replace(node, device=device)


def _builder(n: int = 1) -> tuple[Builder, Node]:
    b = Builder(GraphParams(n, n, Placement.whole("a", 1)))
    return b, b.input("x", (D, n))


def _ffn(b: Builder, x: Node) -> tuple[Node, Node, Node, Node]:
    gate, up = b.matmul(x, _w("gate", D, D), "gate"), b.matmul(x, _w("up", D, D), "up")
    act = b.silu(gate, "act")
    return gate, up, act, b.mul(act, up, "joined")


def test_a_glu_fuses_and_not_when_a_part_is_an_output() -> None:
    b, x = _builder()
    _, _, _, joined = _ffn(b, x)
    assert _fused(b, joined)["project_glu"] == 1
    for which in (0, 1, 2):
        b, x = _builder()
        parts = _ffn(b, x)
        fired = _fused(b, parts[3], parts[which])
        assert fired["project_glu"] == 0
        assert fired["glu"] == (which != 2)


def test_a_norm_read_twice_stays() -> None:
    b, x = _builder()
    normed = b.rms_norm(x, _w("gain", D), 1e-5, "normed")
    product = b.matmul(normed, _w("w", D, D), "product")
    assert _fused(b, product)["project_norm"] == 1
    b, x = _builder()
    normed = b.rms_norm(x, _w("gain", D), 1e-5, "normed")
    product = b.matmul(normed, _w("w", D, D), "product")
    assert _fused(b, b.mul(b.gelu(normed, "also"), product, "out"))["project_norm"] == 0


def test_a_norm_joins_only_few_tokens() -> None:
    for n, fires in ((NORM_PROLOGUE_MAX_TOKENS, 1), (NORM_PROLOGUE_MAX_TOKENS + 1, 0)):
        b, x = _builder(n)
        normed = b.rms_norm(x, _w("gain", D), 1e-5, "normed")
        assert _fused(b, b.matmul(normed, _w("w", D, D), "product"))["project_norm"] == fires


def test_a_product_added_to_itself_is_not_a_residual() -> None:
    b, x = _builder()
    product = b.matmul(x, _w("w", D, D), "product")
    assert _fused(b, b.add(product, product, "twice"))["project_add"] == 0


def test_a_product_with_a_bias_keeps_its_add() -> None:
    b, x = _builder()
    product = b.matmul(x, _w("w", D, D), "product", _w("bias", D))
    assert _fused(b, b.add(x, product, "sum"))["project_add"] == 0


def _attention(k_base: float) -> dict[str, int]:
    """A layer whose k rotates with a base of its own."""
    b, x = _builder()
    with b.layer(0):
        q, k, v = (b.matmul(x, _w(name, D, D), name) for name in "qkv")
        q = b.rope(q, ir.RopeSpec("neox", 4, 4, 1e4), "q_roped")
        k = b.rope(k, ir.RopeSpec("neox", 4, 4, k_base), "k_roped")
        b.kv_store(k, v)
        return _fused(b, b.attn(q, ir.Attn(0, 2, 2, 4, 1.0)))


def test_q_and_k_must_rotate_alike() -> None:
    assert _attention(1e4)["project_qkv"] == 1
    assert _attention(1e6)["project_qkv"] == 0


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden(name) for name in TINY_MODELS}, indent=1) + "\n")
