"""The table of ops, the builder and the verifier: what they accept, and what they refuse by name."""

from __future__ import annotations

import dataclasses
import re

import pytest

from minfer import cases
from minfer.errors import GraphError
from minfer.graph import Graph, GraphParams, Node, Placement, Weight, ir
from minfer.graph.builder import Builder
from minfer.graph.rules import RULES, verify

D = 8


def _builder(n_tokens: int = 3, n_outputs: int = 3, window: int = 0) -> Builder:
    return Builder(GraphParams(n_tokens, n_outputs, Placement.whole("a", 2), window=window))


def _weight(*shape: int, name: str = "w") -> Weight:
    return Weight(name, "F32", shape)


def test_every_op_has_a_rule() -> None:
    ops = {op for op in vars(ir).values() if isinstance(op, type) and issubclass(op, ir.Op) and op is not ir.Op}
    assert set(RULES) == ops


@pytest.mark.parametrize("case", cases.all_cases()[::7], ids=lambda case: case.name)
def test_cases_verify(case: cases.Case) -> None:
    verify(case.graph("a"))


WRONG = {
    "takes rows of 9": lambda b, x: b.matmul(x, _weight(9, 4), "y"),
    "a matrix has two dimensions": lambda b, x: b.matmul(x, _weight(D), "y"),
    "w.bias has shape (5,)": lambda b, x: b.matmul(x, _weight(D, 4), "y", _weight(5, name="w.bias")),
    "a gain is a vector": lambda b, x: b.rms_norm(x, _weight(D, 1), 1e-5, "y"),
    "8 features are not whole heads of 3": lambda b, x: b.head_norm(x, _weight(3), 1e-5, "y"),
    "shapes differ": lambda b, x: b.add(x, b.input("other", (D, 4)), "y"),
    "takes 2 inputs": lambda b, x: b.add_op(ir.Add(), "y", x),
    "takes i32 here, x is f32": lambda b, x: b.add_op(ir.Embed(_weight(D, 4)), "y", x),
    "12 rotary dimensions do not fit a head of 8": lambda b, x: b.rope(x, ir.RopeSpec("neox", 8, 12, 1e4), "y"),
    "come in pairs": lambda b, x: b.rope(x, ir.RopeSpec("neox", 8, 3, 1e4), "y"),
    "freqs has shape (3,)": lambda b, x: b.rope(x, ir.RopeSpec("neox", 8, 8, 1e4, freqs=_weight(3, name="freqs")), "y"),
    "3 query heads do not divide among 2": lambda b, x: b.attn(x, ir.Attn(1, 3, 2, 4, 1.0)),
    "q is (8, 3)": lambda b, x: b.attn(x, ir.Attn(1, 3, 1, 4, 1.0)),
    "at least one row, found 0": lambda b, x: b.attn(x, ir.Attn(1, 2, 1, 4, 1.0, sliding=0)),
    "K (8, 3) and V (4, 3) differ": lambda b, x: b.kv_store(x, b.input("v", (4, 3))),
    "[6, 10) lies outside 8": lambda b, x: b.add_op(ir.View(6, 4), "y", x),
    "has 24 values, (5, 5) has 25": lambda b, x: b.add_op(ir.Reshape((5, 5)), "y", x),
    "does not permute": lambda b, x: b.add_op(ir.Permute((0, 0)), "y", x),
    "one to three segments, found 4": lambda b, x: b.add_op(ir.Project((_weight(D, 4),) * 4), "y", x),
    "swiglu joins two equal segments": lambda b, x: b.add_op(
        ir.Project((_weight(D, 4), _weight(D, 5)), None, "swiglu"), "y", x
    ),
    "epilogue add with 1 inputs": lambda b, x: b.add_op(ir.Project((_weight(D, 4),), None, "add"), "y", x),
    "1 segments, 0 biases": lambda b, x: b.add_op(ir.Project((_weight(D, 4),), None, "bias"), "y", x),
    "q, k and v are 16 values": lambda b, x: b.add_op(
        ir.HeadRopeStore(0, 2, 1, ir.RopeSpec("neox", 4, 4, 1e4)), "y", x, b.positions, b.cells
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_broken_rule_names_the_node_and_both_values(message: str) -> None:
    b = _builder()
    x = b.input("x", (D, 3))
    with b.layer(1), pytest.raises(GraphError, match=re.escape(message)) as raised:
        WRONG[message](b, x)
    assert str(raised.value).startswith("blk.1.")


def test_a_window_of_another_size_names_the_three_layouts() -> None:
    with pytest.raises(GraphError, match=r"0 \(causal\), 2 \(span\), 8 \(map\) values, found 4"):
        _builder(window=4)
    b = _builder()
    op = ir.Attn(0, 2, 1, 4, 1.0)
    with b.layer(0), pytest.raises(GraphError, match=r"none of the three layouts for 3 queries"):
        b.add_op(op, "attn", b.input("x", (D, 3)), b.positions, b.input("odd", (5,), "i32"))


@pytest.mark.parametrize(("n_tokens", "n_outputs"), [(0, 0), (3, 4), (3, -1)])
def test_outputs_are_rows_of_the_tokens(n_tokens: int, n_outputs: int) -> None:
    with pytest.raises(GraphError, match="outputs of"):
        _builder(n_tokens, n_outputs)


def _graph(*nodes: Node, outputs: tuple[int, ...] = ()) -> Graph:
    return Graph(GraphParams(3, 3, Placement.whole("a", 1)), nodes, outputs)


X = Node(0, "x", ir.Input("x"), (), (D, 3), "f32")
Y = Node(1, "y", ir.Silu(), (0,), (D, 3), "f32")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (_graph(X, dataclasses.replace(Y, inputs=(1,))), "y: reads a node that is not before it"),
        (_graph(X, dataclasses.replace(Y, name="x")), "x: the name stands twice"),
        (_graph(X, dataclasses.replace(Y, index=2)), "y: index 2 at place 1"),
        (_graph(X, dataclasses.replace(Y, shape=(D, 4))), r"y: has \(8, 4\) f32, its rule gives \(8, 3\) f32"),
        (_graph(X, Y, outputs=(2,)), r"outputs \[2\] are not nodes"),
    ],
)
def test_the_verifier_finds_a_damaged_graph(graph: Graph, message: str) -> None:
    verify(_graph(X, Y, outputs=(1,)))
    with pytest.raises(GraphError, match=message):
        verify(graph)


def test_attention_before_its_rows_are_stored_is_refused() -> None:
    b = _builder()
    x = b.input("x", (D, 3))
    with b.layer(1):
        out = b.attn(x, ir.Attn(1, 2, 2, 4, 1.0))
        b.kv_store(x, x)
    with pytest.raises(GraphError, match=r"blk\.1\.attn: reads the KV rows of layer 1, which nothing stored"):
        b.finish(out)


def test_attention_of_another_layer_than_was_stored_is_refused() -> None:
    b = _builder()
    x = b.input("x", (D, 3))
    with b.layer(0):
        b.kv_store(x, x)
    with b.layer(1):
        out = b.attn(x, ir.Attn(1, 2, 2, 4, 1.0))
    with pytest.raises(GraphError, match=r"blk\.1\.attn: reads the KV rows of layer 1, which nothing stored"):
        b.finish(out)


def test_what_nobody_asked_for_is_dropped() -> None:
    b = _builder()
    x = b.input("x", (D, 3))
    b.silu(x, "unused")
    with b.layer(0):
        b.kv_store(x, x)
    graph = b.finish(b.gelu(x, "wanted"))
    assert [node.name for node in graph] == ["cells", "x", "blk.0.kv_store", "wanted"]


def test_without_outputs_only_the_kv_stores_run() -> None:
    b = _builder(3, 0)
    x = b.input("x", (D, 3))
    with b.layer(0):
        b.kv_store(x, x)
    graph = b.finish(b.gelu(x, "logits"))
    assert [node.name for node in graph] == ["cells", "x", "blk.0.kv_store"]
    assert graph.outputs == ()
