"""The table of ops: what each takes, what each gives. The verifier, the builder, the docs and the view read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minfer.errors import GraphError
from minfer.graph import ir
from minfer.graph.ir import DType, Graph, Node, Op, Shape, Weight

Infer = Callable[[Any, Sequence[Shape]], Shape]


@dataclass(frozen=True, slots=True)
class Rule:
    """`inputs` are the dtypes taken in order; `infer` gives the shape of the value or raises `GraphError`."""

    inputs: tuple[DType, ...]
    infer: Infer
    text: str
    output: DType = "f32"
    effect: bool = False  # runs for what it writes to the KV cache
    optional: int = 0  # how many of the last inputs may be absent


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise GraphError(message)


def _features(weight: Weight, x: Shape) -> None:
    _need(len(x) >= 1 and weight.shape[0] == x[0], f"{weight.name} takes rows of {weight.shape[0]}, the input has {x}")


def _input(op: ir.Input, _: Sequence[Shape]) -> Shape:
    raise GraphError(f"the shape of input {op.kind} is given, not inferred")


def _embed(op: ir.Embed, x: Sequence[Shape]) -> Shape:
    _need(len(x[0]) == 1, f"token ids are a vector, found {x[0]}")
    return (op.weight.shape[0], x[0][0])


def _get_rows(_: ir.GetRows, x: Sequence[Shape]) -> Shape:
    _need(len(x[0]) == 2 and len(x[1]) == 1, f"rows of a (d, n) value by a vector of ids, found {x[0]} and {x[1]}")
    return (x[0][0], x[1][0])


def _rms_norm(op: ir.RmsNorm, x: Sequence[Shape]) -> Shape:
    _features(op.weight, x[0])
    _need(len(op.weight.shape) == 1, f"a gain is a vector, {op.weight.name} has shape {op.weight.shape}")
    return x[0]


def _head_norm(op: ir.HeadNorm, x: Sequence[Shape]) -> Shape:
    d = op.weight.shape[0]
    _need(len(op.weight.shape) == 1, f"a gain is a vector, {op.weight.name} has shape {op.weight.shape}")
    _need(x[0][0] % d == 0, f"{x[0][0]} features are not whole heads of {d} ({op.weight.name})")
    return x[0]


def _matmul(op: ir.MatMul, x: Sequence[Shape]) -> Shape:
    _features(op.weight, x[0])
    _need(len(op.weight.shape) == 2, f"a matrix has two dimensions, {op.weight.name} has shape {op.weight.shape}")
    if op.bias:
        _bias(op.bias, op.weight)
    return (op.weight.shape[1], *x[0][1:])


def _bias(bias: Weight, weight: Weight) -> None:
    expected = (weight.shape[1],)
    _need(bias.shape == expected, f"{bias.name} has shape {bias.shape}, {weight.name} needs {expected}")


def _rope_spec(spec: ir.RopeSpec) -> None:
    _need(0 < spec.n_dims <= spec.head_dim, f"{spec.n_dims} rotary dimensions do not fit a head of {spec.head_dim}")
    _need(spec.n_dims % 2 == 0, f"rotary dimensions come in pairs, found {spec.n_dims}")
    if spec.freqs:
        expected = (spec.n_dims // 2,)
        _need(spec.freqs.shape == expected, f"{spec.freqs.name} has shape {spec.freqs.shape}, rope needs {expected}")


def _rope(op: ir.Rope, x: Sequence[Shape]) -> Shape:
    _rope_spec(op.spec)
    _need(x[0][0] % op.spec.head_dim == 0, f"{x[0][0]} features are not whole heads of {op.spec.head_dim}")
    _need(x[1] == (x[0][1],), f"one position a token: {x[0][1]} tokens, positions of shape {x[1]}")
    return x[0]


def _kv_store(_: ir.KvStore, x: Sequence[Shape]) -> Shape:
    _need(x[0] == x[1], f"K {x[0]} and V {x[1]} differ; heads of two sizes have no kernel")
    _need(x[2] == (x[0][1],), f"one cell a token: {x[0][1]} tokens, cells of shape {x[2]}")
    return ()


def _window(window: Shape, n_tokens: int) -> None:
    sizes = {"causal": 0, "span": 2 * n_tokens, "map": 8 * n_tokens}
    _need(
        window == (0,) or window in ((2 * n_tokens,), (8 * n_tokens,)),
        f"a window of shape {window} is none of the three layouts for {n_tokens} queries: {sizes}",
    )


def _attn(op: ir.Attn, x: Sequence[Shape]) -> Shape:
    _need(
        op.n_kv_head > 0 and op.n_head % op.n_kv_head == 0,
        f"{op.n_head} query heads do not divide among {op.n_kv_head} KV heads",
    )
    _need(op.sliding is None or op.sliding > 0, f"a sliding window has at least one row, found {op.sliding}")
    width = op.n_head * op.head_dim
    _need(len(x[0]) == 2 and x[0][0] == width, f"{op.n_head} heads of {op.head_dim} are {width} values, q is {x[0]}")
    _need(x[1] == (x[0][1],), f"one position a token: {x[0][1]} tokens, positions of shape {x[1]}")
    _window(x[2], x[0][1])
    return x[0]


def _same(_: Op, x: Sequence[Shape]) -> Shape:
    _need(all(shape == x[0] for shape in x), f"shapes differ: {', '.join(map(str, x))}")
    return x[0]


def _top_k(op: ir.TopK, x: Sequence[Shape]) -> Shape:
    _need(len(x[0]) == 2 and 1 <= op.k <= x[0][0], f"the best {op.k} of rows of a (d, n) value, found {x[0]}")
    return (2 * op.k + 1, x[0][1])


def _view(op: ir.View, x: Sequence[Shape]) -> Shape:
    _need(
        op.start >= 0 and op.size > 0 and op.start + op.size <= x[0][0],
        f"[{op.start}, {op.start + op.size}) lies outside {x[0][0]} features",
    )
    return (op.size, *x[0][1:])


def _reshape(op: ir.Reshape, x: Sequence[Shape]) -> Shape:
    def count(shape: Shape) -> int:
        n = 1
        for extent in shape:
            n *= extent
        return n

    _need(count(op.shape) == count(x[0]), f"{x[0]} has {count(x[0])} values, {op.shape} has {count(op.shape)}")
    return op.shape


def _permute(op: ir.Permute, x: Sequence[Shape]) -> Shape:
    _need(sorted(op.axes) == list(range(len(x[0]))), f"{op.axes} does not permute the axes of {x[0]}")
    return tuple(x[0][axis] for axis in op.axes)


def _project(op: ir.Project, x: Sequence[Shape]) -> Shape:
    _need(1 <= len(op.segments) <= 3, f"one to three segments, found {len(op.segments)}")
    for weight in op.segments:
        _matmul(ir.MatMul(weight), x)
    widths = [weight.shape[1] for weight in op.segments]
    if op.norm:
        _rms_norm(ir.RmsNorm(*op.norm), x)
    if op.epilogue in ("swiglu", "geglu"):
        _need(len(widths) == 2 and widths[0] == widths[1], f"{op.epilogue} joins two equal segments, found {widths}")
        widths = widths[:1]
    if op.epilogue == "bias":
        _need(len(op.biases) == len(op.segments), f"{len(op.segments)} segments, {len(op.biases)} biases")
        for bias, weight in zip(op.biases, op.segments, strict=True):
            _bias(bias, weight)
    shape = (sum(widths), *x[0][1:])
    _need((len(x) == 2) == (op.epilogue == "add"), f"epilogue {op.epilogue} with {len(x)} inputs")
    if op.epilogue == "add":
        _same(op, (shape, x[1]))
    return shape


def _head_rope_store(op: ir.HeadRopeStore, x: Sequence[Shape]) -> Shape:
    _rope_spec(op.rope)
    d, n = op.rope.head_dim, x[0][1]
    widths = (op.n_head * d, op.n_kv_head * d, op.n_kv_head * d)
    _need(x[0][0] == sum(widths), f"q, k and v are {sum(widths)} values, the input has {x[0]}")
    _need(x[1] == (n,) and x[2] == (n,), f"one position and cell a token: {n} tokens, found {x[1]} and {x[2]}")
    for bias, width in zip(op.biases or (), widths, strict=False):
        _need(bias.shape == (width,), f"{bias.name} has shape {bias.shape}, needs {(width,)}")
    for norm in (op.q_norm, op.k_norm):
        _need(norm is None or norm[0].shape == (d,), f"a head norm's gain has {d} values: {norm}")
    return (widths[0], n)


RULES: dict[type[Op], Rule] = {
    ir.Input: Rule((), _input, "given"),
    ir.Embed: Rule(("i32",), _embed, "(n) -> (d, n)"),
    ir.GetRows: Rule(("f32", "i32"), _get_rows, "(d, n), (m) -> (d, m)"),
    ir.RmsNorm: Rule(("f32",), _rms_norm, "(d, n) -> (d, n)"),
    ir.HeadNorm: Rule(("f32",), _head_norm, "(heads * gain, n) -> same"),
    ir.MatMul: Rule(("f32",), _matmul, "(n_in, n) -> (n_out, n)"),
    ir.Rope: Rule(("f32", "i32"), _rope, "(heads * head_dim, n), (n) -> same"),
    ir.KvStore: Rule(("f32", "f32", "i32"), _kv_store, "(d_kv, n) x 2, (n) -> nothing", output="none", effect=True),
    ir.Attn: Rule(("f32", "i32", "i32"), _attn, "(n_head * head_dim, n), (n), (0 | 2n | 8n) -> same as q"),
    ir.Silu: Rule(("f32",), _same, "elementwise"),
    ir.Gelu: Rule(("f32",), _same, "elementwise"),
    ir.Add: Rule(("f32", "f32"), _same, "elementwise, equal shapes"),
    ir.Mul: Rule(("f32", "f32"), _same, "elementwise, equal shapes"),
    ir.Scale: Rule(("f32",), _same, "elementwise"),
    ir.Softmax: Rule(("f32",), _same, "over the first axis"),
    ir.SoftCap: Rule(("f32",), _same, "elementwise"),
    ir.TopK: Rule(("f32",), _top_k, "(d, n) -> (2k + 1, n)", output="i32"),
    ir.View: Rule(("f32",), _view, "(d, n) -> (size, n)"),
    ir.Reshape: Rule(("f32",), _reshape, "equal number of values"),
    ir.Permute: Rule(("f32",), _permute, "axes reordered"),
    ir.SwiGLU: Rule(("f32", "f32"), _same, "elementwise, equal shapes"),
    ir.GeGLU: Rule(("f32", "f32"), _same, "elementwise, equal shapes"),
    ir.Project: Rule(("f32", "f32"), _project, "(n_in, n) [, (n_out, n) to add] -> (n_out, n)", optional=1),
    ir.HeadRopeStore: Rule(("f32", "i32", "i32"), _head_rope_store, "(q + k + v, n), (n), (n) -> (q, n)", effect=True),
}


def infer(op: Op, name: str, inputs: Sequence[Node]) -> tuple[Shape, DType]:
    """Shape and dtype of an op's value. Raises `GraphError` naming the node on a wrong arity, dtype or shape."""
    rule = RULES[type(op)]
    kind = type(op).__name__
    if not len(rule.inputs) - rule.optional <= len(inputs) <= len(rule.inputs):
        raise GraphError(f"{name}: {kind} takes {len(rule.inputs)} inputs ({rule.text}), found {len(inputs)}")
    for node, expected in zip(inputs, rule.inputs, strict=False):
        if node.dtype != expected:
            raise GraphError(f"{name}: {kind} takes {expected} here, {node.name} is {node.dtype}")
    try:
        return rule.infer(op, [node.shape for node in inputs]), rule.output
    except GraphError as error:
        raise GraphError(f"{name}: {kind}: {error}") from None


def verify(graph: Graph) -> None:
    """Check a whole graph: order, names, every rule, and that a layer's KV rows are stored before they are read.

    Raises `GraphError` naming the first node that is wrong.
    """
    seen: set[str] = set()
    stored: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if node.index != position:
            raise GraphError(f"{node.name}: index {node.index} at place {position}")
        if node.name in seen:
            raise GraphError(f"{node.name}: the name stands twice")
        seen.add(node.name)
        if any(not 0 <= source < position for source in node.inputs):
            raise GraphError(f"{node.name}: reads a node that is not before it")
        if not isinstance(node.op, ir.Input):
            shape, dtype = infer(node.op, node.name, [graph.nodes[i] for i in node.inputs])
            if (shape, dtype) != (node.shape, node.dtype):
                raise GraphError(f"{node.name}: has {node.shape} {node.dtype}, its rule gives {shape} {dtype}")
        if isinstance(node.op, (ir.KvStore, ir.HeadRopeStore)):
            stored.add(node.op.layer)
        if isinstance(node.op, ir.Attn) and node.op.layer not in stored:
            raise GraphError(f"{node.name}: reads the KV rows of layer {node.op.layer}, which nothing stored")
    if bad := [index for index in graph.outputs if not 0 <= index < len(graph.nodes)]:
        raise GraphError(f"outputs {bad} are not nodes")
