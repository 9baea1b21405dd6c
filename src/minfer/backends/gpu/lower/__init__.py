"""From a node to its launches. Pure Python: knows a device by its profile, and nothing of Metal or CUDA."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from minfer.backends.gpu.lower import attention, choose, heads, project, simple
from minfer.backends.gpu.lower.context import Context, Lower, Profile, Region
from minfer.errors import GraphError
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from minfer.backends.gpu.launch import Launch
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight

__all__ = ["LOWER", "WEIGHT_TYPES", "Context", "Profile", "Region", "lower", "unsupported"]

#: Weight types with kernels.
WEIGHT_TYPES = tuple(FORMATS)
MAX_HEAD_DIM = 256
#: Threadgroup memory in bytes of the kernel that takes most, with its name.
THREADGROUP_BYTES = {
    "gemm": 12288,
    "attention_tiled": 20480,
    "attention_mma": 27424,
    "attention_g8": 9216,
    "attention_wide_g8": 29440,
    "top_parts": 4096,
}

LOWER: dict[type[ir.Op], Lower] = {
    ir.Embed: simple.embed,
    ir.GetRows: simple.get_rows,
    ir.RmsNorm: simple.rms_norm,
    ir.HeadNorm: heads.head_norm,
    ir.MatMul: project.matmul,
    ir.Rope: heads.rope,
    ir.KvStore: heads.kv_store,
    ir.Attn: attention.attention,
    ir.Softmax: simple.softmax,
    ir.TopK: simple.top_k,
    ir.View: simple.copy,
    ir.Reshape: simple.copy,
    ir.Permute: simple.copy,
    ir.Project: project.project,
    ir.HeadRopeStore: heads.head_rope_store,
    **dict.fromkeys(simple.ELEMENTWISE, simple.elementwise),
}


def lower(context: Context, split: Split) -> list[Launch]:
    """The launches of a split, in the order of its nodes. Raises `GraphError` where a layer has no KV region."""
    launches: list[Launch] = []
    for node in split.nodes:
        layer = getattr(node.op, "layer", None)
        if layer is not None and layer not in context.regions:
            raise GraphError(f"{node.name}: layer {layer} has no KV rows on {context.device}")
        launches += LOWER[type(node.op)](context, node, node.op)
    return launches


def unsupported(node: Node, profile: Profile, kv_format: str) -> str | None:
    """What a device of this profile lacks for `node`, or None."""
    op: Any = node.op
    if type(op) not in LOWER:
        return f"no kernel for {node.kind}"
    matrices = _matrices(op)
    for weight in node.weights:
        if weight in matrices:
            reason = _matrix(weight)
        elif weight.type != "F32":
            reason = f"{weight.name} is {weight.type}; gains, biases and frequency factors are read as F32"
        else:
            reason = None
        if reason:
            return reason
    if isinstance(op, (ir.HeadNorm, ir.Rope, ir.HeadRopeStore, ir.Attn)) and (reason := _head_dim(_dim(op))):
        return reason
    if isinstance(op, ir.HeadRopeStore) and kv_format == "q8_0" and op.rope.head_dim % 32:
        return f"head_rope_store packs q8_0 by heads; a head of {op.rope.head_dim} is not whole blocks of 32"
    if isinstance(op, (ir.View, ir.Permute)) and len(node.shape) > 4:
        return f"copy_strided takes up to 4 axes, found {len(node.shape)}"
    tokens = math.prod(node.shape[1:])
    if isinstance(op, ir.Project) and op.norm and tokens > choose.NORM_MAX_TOKENS:
        return f"a norm joined to a product of {tokens} tokens; kernels take up to {choose.NORM_MAX_TOKENS}"
    if isinstance(op, ir.TopK) and op.k > simple.MAX_TOP_K:
        return f"the best {op.k} of a row; top_parts gives up to {simple.MAX_TOP_K}"
    if node.n_elements >= 1 << 31:
        return f"{math.prod(node.shape):,} values; kernels index up to 2^31"
    for kernel, nbytes in THREADGROUP_BYTES.items():
        if _uses(op, kernel) and nbytes > profile.max_threadgroup_bytes:
            has = profile.max_threadgroup_bytes
            return f"{kernel} takes {nbytes:,} bytes of threadgroup memory, {profile.name} has {has:,}"
    return None


def _matrices(op: Any) -> tuple[Weight, ...]:
    if isinstance(op, (ir.Embed, ir.MatMul)):
        return (op.weight,)
    return op.segments if isinstance(op, ir.Project) else ()


def _matrix(weight: Weight) -> str | None:
    if weight.type not in WEIGHT_TYPES:
        return f"{weight.name} is {weight.type}, which no kernel reads; there are {', '.join(WEIGHT_TYPES)}"
    if weight.shape[0] % (block := FORMATS[weight.type].block_size):
        return f"{weight.name} has rows of {weight.shape[0]} values, no whole blocks of {block} ({weight.type})"
    return None


def _dim(op: ir.HeadNorm | ir.Rope | ir.HeadRopeStore | ir.Attn) -> int:
    if isinstance(op, ir.HeadNorm):
        return op.weight.shape[0]
    if isinstance(op, ir.Rope):
        return op.spec.head_dim
    return op.rope.head_dim if isinstance(op, ir.HeadRopeStore) else op.head_dim


def _head_dim(d: int) -> str | None:
    if d % 8 or not 0 < d <= MAX_HEAD_DIM:
        return f"a head of {d} values; kernels take multiples of 8 up to {MAX_HEAD_DIM}"
    return None


def _uses(op: Any, kernel: str) -> bool:
    if kernel.startswith("attention"):
        return isinstance(op, ir.Attn)
    return isinstance(op, ir.TopK) if kernel.startswith("top") else isinstance(op, (ir.MatMul, ir.Project))
