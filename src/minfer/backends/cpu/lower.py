"""From graph nodes to native operations: one function an op, each adding one operation to a native program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minfer.backends.cpu import _native
from minfer.backends.cpu.rope import angles
from minfer.errors import RequestError
from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minfer.backends.base import Bytes
    from minfer.backends.cpu.backend import CpuBackend
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, RopeSpec
    from minfer.graph.plan import Plan


class CpuProgram:
    """A split compiled once; `run` crosses into native code once."""

    def __init__(self, backend: CpuBackend, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> None:
        lowering = _Lowering(backend, plan, buffers)
        for node in split.nodes:
            if not lowering.is_ranked(node):  # then its products are made where they are ranked
                lowering.lower(node)
        self._native: _native.Program | None = lowering.program

    def run(self) -> None:
        if self._native is None:
            raise RequestError("the backend of this program is closed")
        self._native.run()

    def profile(self, on: bool) -> None:
        """Begin (or stop) to sum seconds by operation."""
        if self._native is not None:
            self._native.profile(on)

    def profiled(self) -> list[tuple[str, float]]:
        """(operation, seconds) of the runs since `profile`, waits for other threads included."""
        return self._native.profiled() if self._native is not None else []

    def close(self) -> None:
        """Let go of buffers, KV rows and weights."""
        self._native = None

    @property
    def counts(self) -> tuple[int, int]:
        """(operations, barriers between them)."""
        return (self._native.size, self._native.barriers) if self._native else (0, 0)


class _Lowering:
    """A program in the making."""

    def __init__(self, backend: CpuBackend, plan: Plan, buffers: Callable[[int], Any]) -> None:
        self.backend = backend
        self.program = _native.Program(backend.workspace)
        self._plan = plan
        self._nodes = plan.graph.nodes
        self._buffers = buffers
        self._tables: dict[tuple[RopeSpec, int], int] = {}

    def buffer(self, index: int) -> Bytes:
        data: Bytes = self._buffers(index)
        return data[: self._nodes[index].nbytes]

    def lower(self, node: Node) -> None:
        OPS[type(node.op)](self, node, node.op, [self.buffer(i) for i in node.inputs])

    def is_ranked(self, node: Node) -> bool:
        """Whether a node is a plain product of which only the largest are wanted: logits that need not be written."""
        op, graph = node.op, self._plan.graph
        plain = isinstance(op, ir.MatMul) and not op.bias
        plain |= isinstance(op, ir.Project) and len(op.segments) == 1 and op.epilogue == "none"
        users = graph.consumers[node.index]
        if not plain or len(users) != 1 or node.index in graph.outputs or graph.params.trace:
            return False
        user = graph.nodes[users[0]]
        if not isinstance(user.op, ir.TopK) or user.device != node.device:
            return False
        # The activations are read until the last of the results is written.
        return self._plan.slot(user).buffer not in {self._plan.slots[i, node.device].buffer for i in node.inputs}

    def rows(self, index: int) -> int:
        """Rows of a value: its elements over its features."""
        node = self._nodes[index]
        return node.n_elements // node.shape[0]

    def table(self, spec: RopeSpec, positions: int) -> int:
        """The table of cosines and sines for these positions: made once a program, read by every layer."""
        found = self._tables.get((spec, positions))
        if found is None:
            freqs = self.backend.vector(spec.freqs) if spec.freqs else None
            inverse, magnitude = angles(spec, freqs)
            data = self.buffer(positions)
            found = self.program.rope_table("rope_table", data, len(data) // 4, inverse, magnitude)
            self._tables[spec, positions] = found
        return found


_Inputs = list["Bytes"]


def _embed(low: _Lowering, node: Node, op: ir.Embed, x: _Inputs) -> None:
    low.program.embed(node.name, x[0], node.shape[1], low.backend.matrix(op.weight), low.buffer(node.index))


def _get_rows(low: _Lowering, node: Node, _: ir.GetRows, x: _Inputs) -> None:
    d, n = node.shape
    low.program.get_rows(node.name, x[0], low.rows(node.inputs[0]), d, x[1], n, low.buffer(node.index))


def _norm(low: _Lowering, node: Node, op: ir.RmsNorm | ir.HeadNorm, x: _Inputs) -> None:
    gain = low.backend.vector(op.weight)
    low.program.rms_norm(node.name, x[0], gain, node.n_elements // len(gain), op.eps, low.buffer(node.index))


def _unary(kind: str, value: Callable[[Any], float] = lambda _: 0.0) -> Callable[..., None]:
    def lower(low: _Lowering, node: Node, op: ir.Op, x: _Inputs) -> None:
        low.program.unary(node.name, kind, x[0], value(op), node.n_elements, low.buffer(node.index))

    return lower


def _binary(kind: str) -> Callable[..., None]:
    def lower(low: _Lowering, node: Node, _: ir.Op, x: _Inputs) -> None:
        low.program.binary(node.name, kind, x[0], x[1], node.n_elements, low.buffer(node.index))

    return lower


def _softmax(low: _Lowering, node: Node, _: ir.Softmax, x: _Inputs) -> None:
    low.program.softmax(node.name, x[0], node.shape[0], low.rows(node.index), low.buffer(node.index))


def _top_k(low: _Lowering, node: Node, op: ir.TopK, x: _Inputs) -> None:
    source = low._nodes[node.inputs[0]]
    if isinstance(source.op, ir.MatMul | ir.Project) and low.is_ranked(source):
        _project(low, source, source.op, [low.buffer(i) for i in source.inputs], node)
        return
    d, n = source.shape
    low.program.top_k(node.name, x[0], d, n, op.k, low.buffer(node.index))


def _view(low: _Lowering, node: Node, op: ir.View, x: _Inputs) -> None:
    stride = low._nodes[node.inputs[0]].shape[0]
    low.program.view(node.name, x[0], stride, op.start, op.size, low.rows(node.index), low.buffer(node.index))


def _reshape(low: _Lowering, node: Node, _: ir.Reshape, x: _Inputs) -> None:
    n = node.n_elements
    low.program.view(node.name, x[0], n, 0, n, 1, low.buffer(node.index))


def _permute(low: _Lowering, node: Node, op: ir.Permute, x: _Inputs) -> None:
    shape = low._nodes[node.inputs[0]].shape
    strides = [1]
    for extent in shape[:-1]:
        strides.append(strides[-1] * extent)
    low.program.permute(
        node.name,
        x[0],
        list(reversed(node.shape)),
        [strides[axis] for axis in reversed(op.axes)],
        low.buffer(node.index),
    )


def _rope(low: _Lowering, node: Node, op: ir.Rope, x: _Inputs) -> None:
    spec = op.spec
    heads = node.shape[0] // spec.head_dim
    table = low.table(spec, node.inputs[1])
    neox = spec.style == "neox"
    low.program.rope(node.name, x[0], table, spec.head_dim, heads, neox, low.buffer(node.index))


def _kv_store(low: _Lowering, node: Node, op: ir.KvStore, x: _Inputs) -> None:
    k, v, cells = x
    low.program.kv_store(node.name, k, v, cells, len(cells) // 4, low.backend.kv(op.layer), op.layer)


def _head_rope_store(low: _Lowering, node: Node, op: ir.HeadRopeStore, x: _Inputs) -> None:
    b = low.backend
    biases = None
    if op.biases:
        q, k, v = (b.vector(w) for w in op.biases)
        biases = (q, k, v)
    (q_gain, q_eps), (k_gain, k_eps) = (
        (b.vector(norm[0]), norm[1]) if norm else (None, 0.0) for norm in (op.q_norm, op.k_norm)
    )
    low.program.head_rope_store(
        node.name,
        x[0],
        x[2],
        node.shape[1],
        op.n_head,
        op.n_kv_head,
        low.table(op.rope, node.inputs[1]),
        op.rope.head_dim,
        op.rope.style == "neox",
        biases,
        q_gain,
        q_eps,
        k_gain,
        k_eps,
        b.kv(op.layer),
        op.layer,
        low.buffer(node.index),
    )


def _attn(low: _Lowering, node: Node, op: ir.Attn, x: _Inputs) -> None:
    n = node.shape[1]
    layout = len(x[2]) // 4 // n
    low.program.attn(
        node.name,
        x[0],
        x[1],
        x[2] if layout else None,
        n,
        op.n_head,
        op.n_kv_head,
        op.head_dim,
        layout,
        op.scale,
        op.softcap or 0.0,
        op.sliding or 0,
        low.backend.kv(op.layer),
        op.layer,
        low.buffer(node.index),
    )


def _project(low: _Lowering, node: Node, op: ir.Project | ir.MatMul, x: _Inputs, ranked: Node | None = None) -> None:
    """Products; of those whose `TopK` is `ranked`, its value alone."""
    b = low.backend
    if isinstance(op, ir.MatMul):
        op = ir.Project((op.weight,), None, "bias" if op.bias else "none", (op.bias,) if op.bias else ())
    top_k = ranked.op.k if ranked and isinstance(ranked.op, ir.TopK) else 0
    gain, eps = (b.vector(op.norm[0]), op.norm[1]) if op.norm else (None, 0.0)
    segments: Sequence[_native.Matrix] = [b.matrix(w) for w in op.segments]
    biases = [b.vector(w) for w in op.biases]
    low.program.project(
        node.name,
        x[0],
        low.rows(node.inputs[0]),
        segments,
        gain,
        eps,
        op.epilogue,
        biases,
        x[1] if len(x) > 1 else None,
        top_k,
        low.buffer((ranked or node).index),
    )


#: The ops that run here; `CpuBackend.supports` reads it.
OPS: dict[type[ir.Op], Callable[..., None]] = {
    ir.Embed: _embed,
    ir.GetRows: _get_rows,
    ir.RmsNorm: _norm,
    ir.HeadNorm: _norm,
    ir.MatMul: _project,
    ir.Rope: _rope,
    ir.KvStore: _kv_store,
    ir.Attn: _attn,
    ir.Silu: _unary("silu"),
    ir.Gelu: _unary("gelu"),
    ir.Add: _binary("add"),
    ir.Mul: _binary("mul"),
    ir.Scale: _unary("scale", lambda op: op.factor),
    ir.Softmax: _softmax,
    ir.SoftCap: _unary("softcap", lambda op: op.cap),
    ir.TopK: _top_k,
    ir.View: _view,
    ir.Reshape: _reshape,
    ir.Permute: _permute,
    ir.SwiGLU: _binary("swiglu"),
    ir.GeGLU: _binary("geglu"),
    ir.Project: _project,
    ir.HeadRopeStore: _head_rope_store,
}
