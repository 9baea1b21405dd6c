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
    from minfer.backends.gpu.launch import Binding, Constant, Launch
    from minfer.graph.ir import Node

#: Simdgroups a threadgroup of the matrix-vector kernels, each with its own rows.
SIMDGROUPS = 4
#: The kernels' numbers of the epilogues.
EPILOGUES = ("none", "bias", "add", "swiglu", "geglu")
GEMM_THREADS = 128
#: Values of a row that `gemm_mma` has in threadgroup memory at a time, where not 256 (tile.h).
CHUNK_VALUES = {"F32": 64, "F16": 128, "BF16": 128, "Q8_0": 128}
#: `project_wide`: its most bytes of threadgroup memory, so that two threadgroups are on a core of the GPU.
WIDE_BYTES = 96 << 10


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
    mixed = glu and op.segments[0].type != op.segments[1].type
    choice = choose.product(c.profile, n_tokens, coded=coded, mixed=mixed)
    family = choice.kernel
    if choice.tier == "mma":
        return mma(c, node, op, values, constants, bindings)
    if choice.tier == "wide":
        return [wide(c, node, op, values, constants, bindings)]
    if choice.tier == "gemm":
        rows = choice.rows // 2 if glu else choice.rows
        tiles = sum(ceil_div(width, rows) for width in (widths[:1] if glu else widths))
        grid, threads = (tiles, ceil_div(n_tokens, choice.tokens), 1), GEMM_THREADS
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


def mma(
    c: Context,
    node: Node,
    op: ir.Project,
    values: dict[str, Field],
    constants: dict[str, Constant],
    bound: list[Binding],
) -> list[Launch]:
    """A product by the tensor cores: its inputs as halves, then the product."""
    x, *_ = c.inputs(node)
    n_in = x.shape[0]
    n_tokens, types = x.n_elements // n_in, {w.type for w in op.segments}
    widths = row_counts(op)

    def nbytes(tokens: int, rows: int) -> int:
        return max(tile_bytes(type_, tokens, rows) for type_ in types)

    tokens, rows, parts = choose.mma_tile(c.profile, n_tokens, sum(widths), nbytes)
    constants |= {"parts": parts, "epilogue": EPILOGUES.index(op.epilogue)}
    halves, scales = rounded_bytes(n_in, n_tokens)
    made = [
        c.value(1, x),
        c.temporary(2, "gemm halves", halves, "write"),
        c.temporary(3, "gemm scales", scales, "write"),
    ]
    taken = [c.temporary(1, "gemm halves", halves, "read"), c.temporary(2, "gemm scales", scales, "read")]
    grid = (sum(ceil_div(width, rows) for width in widths), ceil_div(n_tokens, tokens), 1)
    moved = sum(map(weight_bytes, op.segments)) + halves + node.nbytes + sum(b.nbytes for b in bound if b.slot == 9)
    flops = 2 * x.n_elements * sum(w.shape[1] for w in op.segments)
    return [
        launch(
            node,
            "gemm_mma",
            "gemm_inputs",
            args.PROJECT,
            values,
            made,
            (64 * ceil_div(n_tokens, 128), 1, 1),
            128,
            nbytes=x.nbytes + halves,
        ),
        launch(
            node,
            "gemm_mma",
            f"gemm_mma_{tokens}x{rows}",
            args.PROJECT,
            values,
            [*taken, *(b for b in bound if b.slot > 2)],
            grid,
            2 * rows * parts,
            constants=constants,
            nbytes=moved,
            flops=flops,
            threadgroup_bytes=parts * nbytes(tokens, rows),
        ),
    ]


def row_counts(op: ir.Project) -> list[int]:
    """Rows of each segment; gate and up, which stand in turn in a tile, are one."""
    if op.epilogue in ("swiglu", "geglu"):
        return [2 * op.segments[0].shape[1]]
    return [weight.shape[1] for weight in op.segments]


def rounded_bytes(n_in: int, n_tokens: int) -> tuple[int, int]:
    """Bytes of the inputs of `gemm_mma` as halves, whole 64 values of whole 128 tokens; and of their scales."""
    return 2 * 64 * ceil_div(n_in, 64) * 128 * ceil_div(n_tokens, 128), 4 * n_tokens


def tile_bytes(type_: str, tokens: int, rows: int) -> int:
    """Threadgroup memory of a part of a tile of `gemm_mma`: two slices of 64 inputs as halves, two chunks of the rows,
    the scales of one and two powers of two a row; the numbers are those of tile.h."""
    fmt = FORMATS[type_]
    values = CHUNK_VALUES.get(type_, 256)
    shifts = 15 if fmt.block_bytes % 16 else 0
    stride = 16 * (ceil_div(values // fmt.block_size * fmt.block_bytes + shifts, 16) | 1)
    scales = values // (16 if type_ in ("Q2_K", "Q3_K", "Q6_K") else 32)
    minima = scales if type_ in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 0
    return 256 * tokens + rows * (2 * stride + 4 * (2 + scales + minima))


def wide(
    c: Context,
    node: Node,
    op: ir.Project,
    values: dict[str, Field],
    constants: dict[str, Constant],
    bindings: list[Binding],
) -> Launch:
    """A product of one token by `project_wide`: teams of simdgroups that share rows, the same on every core."""
    x, *residual = c.inputs(node)
    n_in = x.shape[0]
    formats = [FORMATS[w.type] for w in op.segments]
    # Inputs of a simdgroup; sums that it makes at a time, of rows or both sides of pairs; simdgroups a threadgroup.
    slice_, at_a_time, most = (2048, 2, 8) if any(f.block_size == 256 for f in formats) else (1024, 4, 6)
    groups = sum(ceil_div(n, at_a_time) for n in row_counts(op))
    # Bytes for a slice of inputs and its blocks' steps; for a simdgroup's slots and sums; for the norm's chains.
    inputs, chains = 3 * slice_ + slice_ // 64, 1024
    own = at_a_time * max((f.row_bytes(slice_) + 30) // 16 * 16 for f in formats) + 128
    room = min(c.profile.max_threadgroup_bytes, WIDE_BYTES) - chains
    slices = ceil_div(n_in, slice_)
    passes = ceil_div(slices, min(most, room // (inputs + own)))
    across = ceil_div(slices, passes)
    teams = min(most // across, (room - across * inputs) // (across * own))
    a_core = max(1, min(2 * most // (across * teams), ceil_div(groups, teams * c.profile.cores)))
    constants |= {"has_norm": op.norm is not None, "across": across, "passes": passes}
    constants["epilogue"] = EPILOGUES.index(op.epilogue)
    return launch(
        node,
        "project_wide",
        "project_wide",
        args.PROJECT,
        values,
        bindings,
        (a_core * c.profile.cores, 1, 1),
        32 * across * teams,
        constants=constants,
        nbytes=sum(map(weight_bytes, op.segments)) + x.nbytes + node.nbytes + sum(r.nbytes for r in residual),
        flops=2 * n_in * sum(w.shape[1] for w in op.segments),
        threadgroup_bytes=across * (inputs + teams * own) + chains,
    )
