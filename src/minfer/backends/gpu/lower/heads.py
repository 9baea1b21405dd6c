"""Head norms, rope, KV stores, and the launch that does all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from minfer.backends.gpu import args
from minfer.backends.gpu.lower.context import KV_TYPES, Context, ceil_div, launch

if TYPE_CHECKING:
    from minfer.backends.gpu.launch import Binding, Constant, Launch
    from minfer.graph import ir
    from minfer.graph.ir import Node


def rope_turns(spec: ir.RopeSpec, freqs: npt.NDArray[np.float32] | None) -> tuple[npt.NDArray[np.float64], float]:
    """Turns a position of each rotated pair, and YaRN's magnitude. The definitions are those of the reference."""
    pairs = np.arange(spec.n_dims // 2, dtype=np.float64)
    inverse = spec.base ** (-2.0 * pairs / spec.n_dims)
    if freqs is not None:
        inverse = inverse / freqs.astype(np.float64)
    magnitude = 1.0
    if (s := spec.scaling) is not None and s.kind == "linear":
        inverse = inverse / s.factor
    elif s is not None:
        # YaRN, arXiv:2309.00071, section 3.2: a ramp from dimensions that keep their angle to interpolated ones.
        log_base = 2 * math.log(spec.base)
        low, high = (
            spec.n_dims * math.log(s.original_context / (beta * 2 * math.pi)) / log_base
            for beta in (s.beta_fast, s.beta_slow)
        )
        first, last = max(math.floor(low), 0), min(math.ceil(high), spec.n_dims - 1)
        slow = np.clip((pairs - first) / max(last - first, 0.001), 0.0, 1.0)
        inverse = inverse * (1 - slow) + inverse / s.factor * slow
        magnitude = s.attn_factor * (1.0 + 0.1 * math.log(s.factor))
    return inverse / (2 * math.pi), magnitude


def rope_table(spec: ir.RopeSpec, freqs: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    """(n_dims / 2, 2): turns a position as the sum of two f32 numbers, so that a large position keeps its angle."""
    turns, _ = rope_turns(spec, freqs)
    high = turns.astype(np.float32)
    return np.stack([high, (turns - high).astype(np.float32)], axis=-1)


def _table(c: Context, slot: int, spec: ir.RopeSpec) -> Binding:
    def make() -> npt.NDArray[np.float32]:
        return rope_table(spec, c.values(spec.freqs) if spec.freqs else None)

    return c.table(slot, f"rope {spec}", make)


def _magnitude(spec: ir.RopeSpec) -> float:
    return rope_turns(spec, None)[1]


def _constants(head_dim: int, spec: ir.RopeSpec | None = None, kv_format: str = "f32") -> dict[str, Constant]:
    """All function constants of the family, in order; those that a kernel does not read are left at rest."""
    return {
        "head_dim": head_dim,
        "rotary": spec.n_dims if spec else 0,
        "is_neox": spec is not None and spec.style == "neox",
        "kv_format": KV_TYPES[kv_format],
        "has_bias": False,
        "has_q_norm": False,
        "has_k_norm": False,
    }


def _values(**given: float) -> dict[str, int | float]:
    base: dict[str, int | float] = dict.fromkeys(("n_head", "n_kv_head", "width", "row_bytes"), 0)
    base |= {"magnitude": 1.0, "q_eps": 0.0, "k_eps": 0.0}
    return base | given


def head_norm(c: Context, node: Node, op: ir.HeadNorm) -> list[Launch]:
    (x,) = c.inputs(node)
    d, width = op.weight.shape[0], node.shape[0]
    bindings = [c.value(1, x), c.weight(2, op.weight), c.value(3, node, "write")]
    values = _values(width=width, q_eps=op.eps)
    grid = (width // d, node.n_elements // width, 1)
    constants = {"head_dim": d}
    return [
        launch(
            node,
            "heads",
            "head_norm",
            args.HEADS,
            values,
            bindings,
            grid,
            32,
            constants=constants,
            flops=4 * node.n_elements,
        )
    ]


def rope(c: Context, node: Node, op: ir.Rope) -> list[Launch]:
    x, positions = c.inputs(node)
    spec, width = op.spec, node.shape[0]
    bindings = [c.value(1, x), c.value(2, positions), _table(c, 3, spec), c.value(4, node, "write")]
    values = _values(width=width, magnitude=_magnitude(spec))
    constants = {k: v for k, v in _constants(spec.head_dim, spec).items() if k in ("head_dim", "rotary", "is_neox")}
    grid = (width // spec.head_dim, node.shape[1], 1)
    return [
        launch(
            node,
            "heads",
            "rope",
            args.HEADS,
            values,
            bindings,
            grid,
            32,
            constants=constants,
            flops=3 * node.n_elements,
        )
    ]


def kv_store(c: Context, node: Node, op: ir.KvStore) -> list[Launch]:
    k, v, cells = c.inputs(node)
    region = c.regions[op.layer]
    bindings = [c.value(1, k), c.value(2, v), c.value(3, cells)]
    bindings += [c.kv(4, "k", op.layer, "write"), c.kv(5, "v", op.layer, "write")]
    values = _values(width=k.shape[0], row_bytes=region.row_bytes)
    grid = (ceil_div(k.shape[0], 32), k.shape[1], 2)
    return [
        launch(
            node,
            "heads",
            "kv_store",
            args.HEADS,
            values,
            bindings,
            grid,
            32,
            constants={"kv_format": KV_TYPES[c.kv_format]},
            nbytes=k.nbytes + v.nbytes + cells.nbytes + 2 * k.shape[1] * region.row_bytes,
        )
    ]


def head_rope_store(c: Context, node: Node, op: ir.HeadRopeStore) -> list[Launch]:
    qkv, positions, cells = c.inputs(node)
    spec, region = op.rope, c.regions[op.layer]
    bindings = [c.value(1, qkv), c.value(2, positions), c.value(3, cells), _table(c, 4, spec)]
    bindings += [c.value(5, node, "write"), c.kv(6, "k", op.layer, "write"), c.kv(7, "v", op.layer, "write")]
    bindings += [c.weight(8 + i, bias) for i, bias in enumerate(op.biases or ())]
    constants = _constants(spec.head_dim, spec, c.kv_format)
    constants["has_bias"] = op.biases is not None
    for i, (name, norm) in enumerate((("has_q_norm", op.q_norm), ("has_k_norm", op.k_norm))):
        constants[name] = norm is not None
        if norm:
            bindings.append(c.weight(11 + i, norm[0]))
    values = _values(
        n_head=op.n_head,
        n_kv_head=op.n_kv_head,
        width=qkv.shape[0],
        row_bytes=region.row_bytes,
        magnitude=_magnitude(spec),
        q_eps=op.q_norm[1] if op.q_norm else 0.0,
        k_eps=op.k_norm[1] if op.k_norm else 0.0,
    )
    n = qkv.shape[1]
    return [
        launch(
            node,
            "heads",
            "head_rope_store",
            args.HEADS,
            values,
            bindings,
            (op.n_head + 2 * op.n_kv_head, n, 1),
            32,
            constants=constants,
            nbytes=qkv.nbytes + node.nbytes + 2 * n * region.row_bytes,
            flops=3 * qkv.n_elements,
        )
    ]
