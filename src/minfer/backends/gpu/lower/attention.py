"""Attention over a layer's KV rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.backends.gpu import args
from minfer.backends.gpu.lower import choose
from minfer.backends.gpu.lower.context import KV_TYPES, Context, ceil_div, launch

if TYPE_CHECKING:
    from minfer.backends.gpu.launch import Launch
    from minfer.graph import ir
    from minfer.graph.ir import Node

#: Queries of one head a threadgroup of the tiled kernel.
TILE_QUERIES = 8
#: Rows of a threadgroup of the tensor cores' kernel: a row is a query with one of a KV head's query heads.
MMA_ROWS = 64
#: Its threads, where simdgroups do not share rows.
MMA_THREADS = 128


def parts_bytes(op: ir.Attn, n_queries: int, n_splits: int) -> int:
    """Bytes of what the parts of a split window hold: for each a head's values, its maximum and its sum."""
    return 4 * n_queries * op.n_head * n_splits * (op.head_dim + 2) if n_splits > 1 else 0


def attention(c: Context, node: Node, op: ir.Attn) -> list[Launch]:
    q, positions, window = c.inputs(node)
    region, n = c.regions[op.layer], q.shape[1]
    layout = window.shape[0] // n
    bindings = [c.value(1, q), c.value(2, positions), c.kv(4, "k", op.layer, "read"), c.kv(5, "v", op.layer, "read")]
    if layout:
        bindings.append(c.value(3, window))
    # What a window holds is known when it runs; the most that it can hold is what the plan can say.
    rows = min(c.rows or region.n_cells, op.sliding or region.n_cells)
    n_splits = choose.splits(c.profile, n, rows)
    values = {
        "n_head": op.n_head,
        "n_kv_head": op.n_kv_head,
        "n_queries": n,
        "n_splits": n_splits,
        "row_bytes": region.row_bytes,
        "sliding": op.sliding or 0,
        "scale": op.scale,
        "softcap": op.softcap or 0.0,
    }
    constants = {"head_dim": op.head_dim, "kv_format": KV_TYPES[c.kv_format], "layout": layout}
    moved = q.nbytes + node.nbytes + 2 * rows * region.row_bytes
    flops = 4 * rows * node.n_elements
    group = op.n_head // op.n_kv_head
    if choose.tiled(c.profile, n, layout):
        kernel, grid, threads = "attention_tiled", (op.n_head, ceil_div(n, TILE_QUERIES), 1), 32
        if choose.attention_mma(c.profile, n, layout):
            tiles = ceil_div(n * group, MMA_ROWS)
            sharing = choose.sharing(c.profile, op.head_dim, tiles * op.n_kv_head)
            constants["sharing"] = sharing
            kernel, grid, threads = "attention_mma", (tiles, op.n_kv_head, 1), MMA_THREADS * sharing
        return [
            launch(
                node,
                kernel,
                kernel,
                args.ATTN,
                values,
                [*bindings, c.value(6, node, "write")],
                grid,
                threads,
                constants=constants,
                nbytes=moved,
                flops=flops,
            )
        ]
    wide = choose.wide_attention(c.profile, n)
    heads = choose.head_group(group, alone=wide and n_splits == 1)
    constants["is_split"] = n_splits > 1
    family, threads = ("attention_wide", 256) if wide else ("attention", 32)
    kernel, grid = f"{family}_g{heads}", (op.n_kv_head * ceil_div(group, heads), n, n_splits)
    if n_splits == 1:
        bindings.append(c.value(6, node, "write"))
    else:
        size = parts_bytes(op, n, n_splits)
        bindings.append(c.temporary(7, "attention", size, "write"))
    launches = [
        launch(
            node,
            family,
            kernel,
            args.ATTN,
            values,
            bindings,
            grid,
            threads,
            constants=constants,
            nbytes=moved,
            flops=flops,
        )
    ]
    if n_splits > 1:
        parts = [c.temporary(1, "attention", size, "read"), c.value(2, node, "write")]
        launches.append(
            launch(
                node,
                "attention",
                "attention_combine",
                args.ATTN,
                values,
                parts,
                (op.n_head, n, 1),
                256,
                constants={"head_dim": op.head_dim},
                flops=n_splits * node.n_elements,
            )
        )
    return launches
