"""Fusion: rewrite rules over an assigned graph. A rule fires only where the node's device supports the fused op.

A fused op computes what its parts compute, in the same order, so on one device both graphs give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minfer.graph import ir
from minfer.graph.ir import Graph, Node, Renumber, Weight

if TYPE_CHECKING:
    from minfer.graph.assign import Device

#: Beyond this many tokens a matrix product tiles over tokens and would redo its input's norm in every tile.
NORM_PROLOGUE_MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Nodes `removed` become `nodes`; the last of them takes the place of `anchor`, the last of `removed`."""

    removed: tuple[int, ...]
    nodes: tuple[Node, ...]


Match = Callable[["_Graph", Node], Rewrite | None]


@dataclass(frozen=True, slots=True)
class FusionRule:
    name: str
    tokens: str
    match: Match


class _Graph:
    """A graph while it is matched: who reads what, and which values must survive."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.kept = set(graph.outputs)

    def source(self, node: Node, which: int = 0) -> Node:
        return self.nodes[node.inputs[which]]

    def only_for(self, node: Node, *readers: Node) -> bool:
        """Whether nothing but `readers` needs the value of `node`."""
        users = self.graph.consumers[node.index]
        return node.index not in self.kept and set(users) <= {reader.index for reader in readers}

    def alone(self, *chain: Node) -> bool:
        """Whether every node of the chain is read by the next one alone, all on one device and in one layer."""
        return all(self.only_for(a, b) and a.device == b.device for a, b in itertools.pairwise(chain))

    def norm_of(self, x: Node, readers: Sequence[Node]) -> tuple[tuple[Weight, float] | None, Node, tuple[int, ...]]:
        """The norm to take as a prologue of `readers`: (gain and eps or None, the input, nodes removed)."""
        few = x.shape[1:] == () or x.shape[1] <= NORM_PROLOGUE_MAX_TOKENS
        same_device = all(r.device == x.device for r in readers)
        if few and isinstance(x.op, ir.RmsNorm) and same_device and self.only_for(x, *readers):
            return (x.op.weight, x.op.eps), self.source(x), (x.index,)
        return None, x, ()


def _glu(graph: _Graph, node: Node) -> Rewrite | None:
    """act(gate) * up -> SwiGLU or GeGLU."""
    if not isinstance(node.op, ir.Mul):
        return None
    act, up = graph.source(node), graph.source(node, 1)
    op = {ir.Silu: ir.SwiGLU(), ir.Gelu: ir.GeGLU()}.get(type(act.op))
    if op is None or not graph.alone(act, node):
        return None
    return Rewrite((act.index, node.index), (_like(node, op, act.inputs[0], up.index),))


def _project_glu(graph: _Graph, node: Node) -> Rewrite | None:
    """[norm], gate and up, joined -> one Project."""
    epilogue: dict[type[ir.Op], ir.Epilogue] = {ir.SwiGLU: "swiglu", ir.GeGLU: "geglu"}
    if type(node.op) not in epilogue:
        return None
    gate, up = graph.source(node), graph.source(node, 1)
    if not (isinstance(gate.op, ir.MatMul) and isinstance(up.op, ir.MatMul)):
        return None
    if gate.op.bias or up.op.bias or gate.inputs != up.inputs or gate.index == up.index:
        return None
    if not (graph.alone(gate, node) and graph.alone(up, node)):
        return None
    norm, x, removed = graph.norm_of(graph.source(gate), (gate, up))
    op = ir.Project((gate.op.weight, up.op.weight), norm, epilogue[type(node.op)])
    return Rewrite((*removed, gate.index, up.index, node.index), (_like(node, op, x.index),))


def _project_qkv(graph: _Graph, node: Node) -> Rewrite | None:
    """[norm], q k v projections, [biases], [head norms], rope and KV store -> Project, then HeadRopeStore."""
    if not isinstance(node.op, ir.KvStore):
        return None
    k, v = graph.source(node), graph.source(node, 1)
    k_chain = _head_chain(graph, k)
    if k_chain is None or not isinstance(v.op, ir.MatMul):
        return None
    roped = [n for n in graph.nodes if n.layer == node.layer and isinstance(n.op, ir.Rope) and n.index != k.index]
    q = roped[0] if len(roped) == 1 else None
    q_chain = _head_chain(graph, q) if q else None
    if q is None or q_chain is None or q.index > node.index or q.op != k.op or q.inputs[1] != k.inputs[1]:
        return None
    assert isinstance(q.op, ir.Rope)
    rope, head_dim = q.op.spec, q.op.spec.head_dim
    q_mul, k_mul = q_chain[-1], k_chain[-1]
    muls = (q_mul, k_mul, v)
    ops = [m.op for m in muls if isinstance(m.op, ir.MatMul)]
    if len({m.inputs for m in muls}) != 1 or len({id(m) for m in muls}) != 3 or len(ops) != 3:
        return None
    chains_end = graph.alone(*reversed(q_chain)) and graph.alone(*reversed(k_chain), node) and graph.alone(v, node)
    biases = tuple(op.bias for op in ops if op.bias is not None)
    if not chains_end or q.device != node.device or len(biases) not in (0, 3):
        return None
    norm, x, removed = graph.norm_of(graph.source(q_mul), muls)
    project = ir.Project(tuple(op.weight for op in ops), norm)
    width = sum(weight.shape[1] for weight in project.segments)
    stem = node.name.removesuffix("kv_store")
    qkv = Node(-1, f"{stem}qkv", project, (x.index,), (width, *v.shape[1:]), "f32", node.layer, node.device)
    store = ir.HeadRopeStore(
        node.op.layer,
        q.shape[0] // head_dim,
        k.shape[0] // head_dim,
        rope,
        (biases[0], biases[1], biases[2]) if biases else None,
        _gain(q_chain),
        _gain(k_chain),
    )
    inputs = (-1, q.inputs[1], node.inputs[2])
    stored = Node(q.index, f"{stem}rope_store", store, inputs, q.shape, "f32", node.layer, node.device)
    chain = tuple(n.index for n in (*q_chain, *k_chain, v, node))
    return Rewrite((*removed, *chain), (qkv, stored))


def _head_chain(graph: _Graph, rope: Node) -> tuple[Node, ...] | None:
    """Rope, [HeadNorm], MatMul: from the end back to the projection."""
    if not isinstance(rope.op, ir.Rope):
        return None
    below = graph.source(rope)
    chain = (rope, below, graph.source(below)) if isinstance(below.op, ir.HeadNorm) else (rope, below)
    return chain if isinstance(chain[-1].op, ir.MatMul) else None


def _gain(chain: Sequence[Node]) -> tuple[Weight, float] | None:
    op = chain[1].op
    return (op.weight, op.eps) if isinstance(op, ir.HeadNorm) else None


def _project_add(graph: _Graph, node: Node) -> Rewrite | None:
    """A projection and the residual added to it -> one Project."""
    if not isinstance(node.op, ir.Add):
        return None
    for which in (1, 0):
        product, residual = graph.source(node, which), graph.source(node, 1 - which)
        if (
            isinstance(product.op, ir.MatMul)
            and not product.op.bias
            and product.index != residual.index
            and graph.alone(product, node)
        ):
            op = ir.Project((product.op.weight,), None, "add")
            fused = _like(node, op, product.inputs[0], residual.index)
            return Rewrite((product.index, node.index), (fused,))
    return None


def _project_norm(graph: _Graph, node: Node) -> Rewrite | None:
    """A norm read by one projection alone -> one Project (the output head)."""
    if not isinstance(node.op, ir.MatMul) or node.op.bias:
        return None
    norm, x, removed = graph.norm_of(graph.source(node), (node,))
    if norm is None:
        return None
    return Rewrite((*removed, node.index), (_like(node, ir.Project((node.op.weight,), norm), x.index),))


def _like(node: Node, op: ir.Op, *inputs: int) -> Node:
    """`node` with another op and other inputs: same name, shape and place."""
    return Node(node.index, node.name, op, inputs, node.shape, node.dtype, node.layer, node.device)


_NORM = f"any; the norm joins at up to {NORM_PROLOGUE_MAX_TOKENS} tokens"
FUSIONS: tuple[FusionRule, ...] = (
    FusionRule("glu", "any", _glu),
    FusionRule("project_glu", _NORM, _project_glu),
    FusionRule("project_qkv", _NORM, _project_qkv),
    FusionRule("project_add", "any", _project_add),
    FusionRule("project_norm", f"up to {NORM_PROLOGUE_MAX_TOKENS}", _project_norm),
)


def fuse(graph: Graph, devices: Mapping[str, Device]) -> tuple[Graph, dict[str, int]]:
    """Apply every rule not named in `params.unfused`, in the order of `FUSIONS`; also says how often each fired."""
    fired: dict[str, int] = {}
    for rule in FUSIONS:
        if rule.name not in graph.params.unfused:
            graph, fired[rule.name] = _apply(graph, rule, devices)
    return graph, fired


def _apply(graph: Graph, rule: FusionRule, devices: Mapping[str, Device]) -> tuple[Graph, int]:
    view = _Graph(graph)
    gone: set[int] = set()
    at: dict[int, Rewrite] = {}  # the last node of a rewrite -> the rewrite
    for node in graph:
        rewrite = rule.match(view, node)
        if rewrite is None or gone & set(rewrite.removed):
            continue
        if all(devices[n.device].supports(n) is None for n in rewrite.nodes):
            gone.update(rewrite.removed)
            at[max(rewrite.removed)] = rewrite
    if not at:
        return graph, 0
    out = Renumber()
    for node in graph:
        if rewrite := at.get(node.index):
            for new in rewrite.nodes:
                out.add(new)
        elif node.index not in gone:
            out.add(node)
    return Graph(graph.params, tuple(out.nodes), tuple(out.index[i] for i in graph.outputs)), len(at)
