"""Matrix products: `MatMul` and `Project`, by the kernel that the choice table gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.backends.gpu import args
from minfer.backends.gpu.lower import choose
from minfer.backends.gpu.lower.context import Context, ceil_div, launch, weight_bytes
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from minfer.backends.gpu.args import Field
    from minfer.backends.gpu.launch import Constant, Launch
    from minfer.graph.ir import Node

#: Simdgroups a threadgroup of the matrix-vector kernels, each with its own rows.
SIMDGROUPS = 4
#: The kernels' numbers of the epilogues.
EPILOGUES = ("none", "bias", "add", "swiglu", "geglu")
GEMM_THREADS = 128
#: `project_wide`: the most inputs and simdgroups of a threadgroup; its bytes for weights where threadgroup memory is no more
#: than Metal's 32 KB, and where it is 48 KB; the simdgroups of a core of the GPU, which their registers bound.
WIDE_INPUTS, WIDE_SIMDGROUPS, WIDE_RING, WIDE_RESIDENT = 5120, 8, (14336, 28672), 16


def matmul(c: Context, node: Node, op: ir.MatMul) -> list[Launch]:
    """A product is a projection of one segment."""
    if op.bias:
        return project(c, node, ir.Project((op.weight,), None, "bias", (op.bias,)))
    return project(c, node, ir.Project((op.weight,)))


def project(c: Context, node: Node, op: ir.Project) -> list[Launch]:
    x, *residual = c.inputs(node)
    n_in = x.shape[0]
    n_tokens = x.n_elements // n_in
    glu = op.epilogue in ("swiglu", "geglu")
    widths = tuple(weight.shape[1] for weight in op.segments)
    padding = (0,) * (3 - len(op.segments))
    values: dict[str, Field] = {
        "n_in": n_in,
        "n_out": node.shape[0],
        "n_tokens": n_tokens,
        "rows": widths + padding,
        "row_bytes": (*(FORMATS[w.type].row_bytes(n_in) for w in op.segments), *padding),
        "eps": op.norm[1] if op.norm else 0.0,
    }
    types = [FORMATS[w.type].id for w in op.segments]
    types += [types[0]] * (3 - len(types))
    constants: dict[str, Constant] = {f"type_{i}": type_ for i, type_ in enumerate(types)}
    constants["n_segments"] = len(op.segments)
    bindings = [c.value(1, x), c.value(10, node, "write")]
    bindings += [c.weight(3 + i, weight) for i, weight in enumerate(op.segments)]
    bindings += [c.weight(6 + i, bias) for i, bias in enumerate(op.biases)]
    bindings += [c.value(9, value) for value in residual]
    if op.norm:
        bindings.append(c.weight(2, op.norm[0]))
    coded = all(FORMATS[w.type].block_size > 1 for w in op.segments)
    choice = choose.product(c.profile, n_tokens, coded=coded)
    family = choice.kernel
    if choice.tier in ("gemm", "mma"):
        rows = choice.rows // 2 if glu else choice.rows
        tiles = sum(ceil_div(width, rows) for width in (widths[:1] if glu else widths))
        grid, threads = (tiles, ceil_div(n_tokens, choice.tokens), 1), GEMM_THREADS
    elif choice.tier == "wide":
        constants["has_norm"] = op.norm is not None
        constants["across"], constants["passes"], grid, threads = _wide(c, op, n_in, (2 * widths[0],) if glu else widths)
    else:
        constants["has_norm"] = op.norm is not None
        groups = sum(ceil_div(width, choice.rows) for width in (widths[:1] if glu else widths))
        grid = (ceil_div(groups, SIMDGROUPS), ceil_div(n_tokens, choice.tokens), 1)
        threads, family = 32 * SIMDGROUPS, "project"
    constants["epilogue"] = EPILOGUES.index(op.epilogue)
    moved = sum(map(weight_bytes, op.segments)) + x.nbytes + node.nbytes + sum(r.nbytes for r in residual)
    flops = 2 * n_in * sum(widths) * n_tokens
    return [
        launch(
            node,
            family,
            choice.kernel,
            args.PROJECT,
            values,
            bindings,
            grid,
            threads,
            constants=constants,
            nbytes=moved,
            flops=flops,
        )
    ]


def _wide(c: Context, op: ir.Project, n_in: int, sums: tuple[int, ...]) -> tuple[int, int, tuple[int, int, int], int]:
    """Of `project_wide`: how many simdgroups share a row, in how many passes; grid and threads: teams on every core."""
    formats = [FORMATS[w.type] for w in op.segments]
    # Inputs of a simdgroup, and sums that it makes at a time.
    slice_, at_a_time = (2048, 2) if any(f.block_size == 256 for f in formats) else (1024, 4)
    slot = max((f.row_bytes(slice_) + 30) // 16 * 16 for f in formats)
    ring = WIDE_RING[c.profile.max_threadgroup_bytes >= 48 << 10]
    most = min(WIDE_SIMDGROUPS, ring // (at_a_time * slot))
    slices = ceil_div(n_in, slice_)
    passes = ceil_div(slices, min(most, WIDE_INPUTS // slice_))
    across = ceil_div(slices, passes)
    teams = most // across
    groups = sum(ceil_div(n, at_a_time) for n in sums)
    a_core = min(WIDE_RESIDENT // (across * teams), ceil_div(groups, teams * c.profile.cores))
    return across, passes, (max(1, a_core) * c.profile.cores, 1, 1), 32 * across * teams
