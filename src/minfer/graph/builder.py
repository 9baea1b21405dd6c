"""Builds a graph op by op; a model file reads like its paper because shapes and names are settled here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from minfer.errors import GraphError
from minfer.graph import ir, rules
from minfer.graph.ir import DType, Graph, GraphParams, Node, Op, Renumber, Shape, Weight

if TYPE_CHECKING:
    from collections.abc import Iterator


class Builder:
    """Appends nodes. Every method takes and gives nodes; `name` is completed with the current layer's prefix.

    The model's inputs (`token_ids`, `positions`, `cells`, `window`, `tail_ids`) are ready-made nodes.
    """

    def __init__(self, params: GraphParams) -> None:
        if params.window not in ir.WINDOW_LAYOUTS:
            sizes = ", ".join(f"{size} ({name})" for size, name in ir.WINDOW_LAYOUTS.items())
            raise GraphError(f"a query's window has {sizes} values, found {params.window}")
        if params.n_tokens < 1 or not 0 <= params.n_outputs <= params.n_tokens:
            raise GraphError(f"{params.n_outputs} outputs of {params.n_tokens} tokens")
        self.params = params
        self.nodes: list[Node] = []
        self._layer: int | None = None
        n = params.n_tokens
        self.token_ids = self.input("token_ids", (n,), "i32")
        self.positions = self.input("positions", (n,), "i32")
        self.cells = self.input("cells", (n,), "i32")
        self.window = self.input("window", (params.window * n,), "i32")
        self.tail_ids = self.input("tail_ids", (params.n_outputs,), "i32")

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Nodes made inside belong to the layer and are named `blk.<index>.<name>`."""
        self._layer = index
        yield
        self._layer = None

    @property
    def layer_index(self) -> int:
        """The current layer, by which KV rows are found."""
        if self._layer is None:
            raise GraphError("KV rows belong to a layer: open one first")
        return self._layer

    def input(self, kind: str, shape: Shape, dtype: DType = "f32") -> Node:
        return self._append(Node(len(self.nodes), kind, ir.Input(kind), (), shape, dtype))

    def add_op(self, op: Op, name: str, *inputs: Node) -> Node:
        """Append any op; shape and dtype come from the rules."""
        full = name if self._layer is None else f"blk.{self._layer}.{name}"
        shape, dtype = rules.infer(op, full, inputs)
        sources = tuple(node.index for node in inputs)
        return self._append(Node(len(self.nodes), full, op, sources, shape, dtype, self._layer))

    def _append(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def embed(self, weight: Weight) -> Node:
        return self.add_op(ir.Embed(weight), "embed", self.token_ids)

    def rms_norm(self, x: Node, weight: Weight, eps: float, name: str) -> Node:
        return self.add_op(ir.RmsNorm(weight, eps), name, x)

    def head_norm(self, x: Node, weight: Weight, eps: float, name: str) -> Node:
        return self.add_op(ir.HeadNorm(weight, eps), name, x)

    def matmul(self, x: Node, weight: Weight, name: str, bias: Weight | None = None) -> Node:
        return self.add_op(ir.MatMul(weight, bias), name, x)

    def rope(self, x: Node, spec: ir.RopeSpec, name: str) -> Node:
        return self.add_op(ir.Rope(spec), name, x, self.positions)

    def kv_store(self, k: Node, v: Node) -> Node:
        return self.add_op(ir.KvStore(self.layer_index), "kv_store", k, v, self.cells)

    def attn(self, q: Node, op: ir.Attn) -> Node:
        return self.add_op(op, "attn", q, self.positions, self.window)

    def silu(self, x: Node, name: str) -> Node:
        return self.add_op(ir.Silu(), name, x)

    def gelu(self, x: Node, name: str) -> Node:
        return self.add_op(ir.Gelu(), name, x)

    def add(self, a: Node, b: Node, name: str) -> Node:
        return self.add_op(ir.Add(), name, a, b)

    def mul(self, a: Node, b: Node, name: str) -> Node:
        return self.add_op(ir.Mul(), name, a, b)

    def scale(self, x: Node, factor: float, name: str) -> Node:
        return self.add_op(ir.Scale(factor), name, x)

    def soft_cap(self, x: Node, cap: float, name: str) -> Node:
        return self.add_op(ir.SoftCap(cap), name, x)

    def top_k(self, x: Node, k: int) -> Node:
        return self.add_op(ir.TopK(k), "top_k", x)

    def tail_rows(self, x: Node) -> Node:
        """The rows whose logits are asked for; `x` itself where that is all of them."""
        if self.params.n_outputs == self.params.n_tokens:
            return x
        return self.add_op(ir.GetRows(), "tail_rows", x, self.tail_ids)

    def finish(self, *outputs: Node) -> Graph:
        """The verified graph of what leads to `outputs` or writes to the KV cache; the rest is dropped.

        Without output rows (`n_outputs` 0) only the KV stores count.
        """
        wanted = [node.index for node in outputs] if self.params.n_outputs else []
        live = set(wanted)
        live.update(n.index for n in self.nodes if rules.RULES[type(n.op)].effect)
        for node in reversed(self.nodes):
            if node.index in live:
                live.update(node.inputs)
        kept = Renumber()
        for node in self.nodes:
            if node.index in live:
                kept.add(node)
        graph = Graph(self.params, tuple(kept.nodes), tuple(kept.index[i] for i in wanted))
        rules.verify(graph)
        return graph
