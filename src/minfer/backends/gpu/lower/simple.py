"""Rows, copies, norms and elementwise ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minfer.backends.gpu import args
from minfer.backends.gpu.launch import Binding, Launch, Ref
from minfer.backends.gpu.lower.context import Context, ceil_div, launch
from minfer.errors import UnsupportedError
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from minfer.backends.gpu.args import Field
    from minfer.graph.ir import Node

THREADS = 128
#: Values a part of a row whose best are looked for, the most parts of a row, and the most that are looked for.
TOP_PART, MAX_TOP_PARTS, MAX_TOP_K = 1024, 1024, 1024
#: Strands of rows in one launch of `move_rows`: a grid has up to 65,535 threadgroups in y on some devices.
MAX_STRANDS = 1 << 15

#: The kernel's numbers of the elementwise ops; the index is the function constant `operation`.
ELEMENTWISE = (ir.Silu, ir.Gelu, ir.Scale, ir.SoftCap, ir.Add, ir.Mul, ir.SwiGLU, ir.GeGLU)


def embed(c: Context, node: Node, op: ir.Embed) -> list[Launch]:
    (ids,) = c.inputs(node)
    n_in, n = node.shape
    row_bytes = FORMATS[op.weight.type].row_bytes(n_in)
    bindings = [c.value(1, ids), c.weight(2, op.weight), c.value(3, node, "write")]
    units = ceil_div(n_in, 16)
    return [
        launch(
            node,
            "rows",
            "embed",
            args.EMBED,
            {"n_in": n_in, "row_bytes": row_bytes},
            bindings,
            (ceil_div(units, THREADS), n, 1),
            THREADS,
            constants={"type_0": FORMATS[op.weight.type].id},
            nbytes=ids.nbytes + n * row_bytes + node.nbytes,
        )
    ]


def get_rows(c: Context, node: Node, op: ir.GetRows) -> list[Launch]:
    x, ids = c.inputs(node)
    d, m = node.shape
    values: dict[str, Field] = {"n": d * m, "start": 0, "extent": (d, m, 1, 1), "stride": (1, d, 0, 0)}
    bindings = [c.value(1, x), c.value(2, ids), c.value(3, node, "write")]
    grid = (ceil_div(d, THREADS), m, 1)
    return [
        launch(
            node, "rows", "get_rows", args.COPY, values, bindings, grid, THREADS, nbytes=ids.nbytes + 2 * node.nbytes
        )
    ]


def copy(c: Context, node: Node, op: ir.View | ir.Reshape | ir.Permute) -> list[Launch]:
    """A dense copy of strided values."""
    (x,) = c.inputs(node)
    start, shape = 0, node.shape
    strides = [1]
    for extent in x.shape:
        strides.append(strides[-1] * extent)
    if isinstance(op, ir.View):
        start = op.start
        stride = tuple(strides[: len(shape)])
    elif isinstance(op, ir.Permute):
        stride = tuple(strides[axis] for axis in op.axes)
    else:
        shape, stride = (node.n_elements,), (1,)
    values: dict[str, Field] = {
        "n": node.n_elements,
        "start": start,
        "extent": (*shape, *(1,) * (4 - len(shape))),
        "stride": (*stride, *(0,) * (4 - len(stride))),
    }
    bindings = [c.value(1, x), c.value(2, node, "write")]
    grid = (ceil_div(node.n_elements, THREADS), 1, 1)
    return [launch(node, "rows", "copy_strided", args.COPY, values, bindings, grid, THREADS, nbytes=2 * node.nbytes)]


def move_rows(ref: Ref, row_bytes: int, source: int, target: int, count: int) -> Launch:
    """KV rows from cell to cell, verbatim. Where the two overlap, the strands (see the kernel) divide the distance."""
    words, distance = row_bytes // 4, abs(target - source)
    strands = min(distance, count)
    if strands > MAX_STRANDS:
        strands = MAX_STRANDS if distance >= count else math.gcd(distance, MAX_STRANDS)
    packed = args.MOVE.pack(source=source, target=target, count=count, words=words, strands=strands)
    first, last = min(source, target) * row_bytes, (max(source, target) + count) * row_bytes
    return Launch(
        f"cells {source} to {target} of {ref}",
        "rows",
        "move_rows",
        (),
        args.MOVE.name,
        packed,
        (Binding(1, ref, first, last, "both"),),
        (ceil_div(words, THREADS), strands, 1),
        THREADS,
        2 * count * row_bytes,
        0,
    )


def rms_norm(c: Context, node: Node, op: ir.RmsNorm) -> list[Launch]:
    (x,) = c.inputs(node)
    d = node.shape[0]
    values = {"n": d, "eps": op.eps}
    bindings = [c.value(1, x), c.weight(2, op.weight), c.value(3, node, "write")]
    grid = (node.n_elements // d, 1, 1)
    return [launch(node, "norms", "rms_norm", args.NORM, values, bindings, grid, THREADS, flops=4 * node.n_elements)]


def softmax(c: Context, node: Node, op: ir.Softmax) -> list[Launch]:
    (x,) = c.inputs(node)
    d = node.shape[0]
    bindings = [c.value(1, x), c.value(2, node, "write")]
    grid = (node.n_elements // d, 1, 1)
    values = {"n": d, "eps": 0.0}
    return [launch(node, "norms", "softmax", args.NORM, values, bindings, grid, 32, flops=5 * node.n_elements)]


def top_k(c: Context, node: Node, op: ir.TopK) -> list[Launch]:
    (x,) = c.inputs(node)
    d, n = x.shape
    parts = ceil_div(d, TOP_PART)
    if parts > MAX_TOP_PARTS:
        raise UnsupportedError(f"{node.name}: rows of {d:,}; top_merge takes up to {MAX_TOP_PARTS * TOP_PART:,} values")
    size = 4 * n * parts * (2 * op.k + 2)
    values = {"n": d, "k": op.k}
    first = [c.value(1, x), c.temporary(2, "top", size, "write")]
    second = [c.temporary(1, "top", size, "read"), c.value(2, node, "write")]
    return [
        launch(node, "top", "top_parts", args.TOP, values, first, (parts, n, 1), 32, flops=(op.k + 4) * x.n_elements),
        launch(node, "top", "top_merge", args.TOP, values, second, (n, 1, 1), 32, flops=op.k * n * parts),
    ]


def elementwise(c: Context, node: Node, op: ir.Op) -> list[Launch]:
    inputs = c.inputs(node)
    n = node.n_elements
    factor = op.factor if isinstance(op, ir.Scale) else op.cap if isinstance(op, ir.SoftCap) else 0.0
    bindings = [*(c.value(1 + i, x) for i, x in enumerate(inputs)), c.value(3, node, "write")]
    constants = {"operation": ELEMENTWISE.index(type(op)), "is_binary": len(inputs) == 2}
    return [
        launch(
            node,
            "elementwise",
            "elementwise",
            args.ELEMENTWISE,
            {"n": n, "factor": factor},
            bindings,
            (ceil_div(n, THREADS), 1, 1),
            THREADS,
            constants=constants,
            flops=n,
        )
    ]
