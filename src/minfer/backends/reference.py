"""The oracle: numpy, one obvious function an op. Every other backend is compared with it.

Arrays have the reversed logical shape: `(d, n_tokens)` is `(n_tokens, d)` here. Values are f32; norms, softmax and
rotary angles are computed in f64. Weights are dequantized once, on first use: the one place that keeps a second copy,
since numpy multiplies only what is unpacked.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.backends.host import HostBackend
from minfer.errors import NumericsError, RequestError
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from minfer.backends.base import Bytes, KvRegion
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan
    from minfer.quants import KvFormat

#: Largest `cases.error` against the definitions, for all but moves: f64 inside, one f32 rounding, f32 BLAS products.
BOUND = 2e-5

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


# --- the ops -----------------------------------------------------------------------------------------------------


def rms_norm(x: F32, gain: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed: F32 = (wide * scale * gain).astype(np.float32)
    return normed


def head_norm(x: F32, gain: F32, eps: float) -> F32:
    """`rms_norm` of each head of `len(gain)` values."""
    return rms_norm(x.reshape(*x.shape[:-1], -1, len(gain)), gain, eps).reshape(x.shape)


def matmul(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """x (..., n_in) times weight (n_out, n_in) transposed, plus bias (n_out)."""
    product: F32 = x @ weight.T
    return product if bias is None else product + bias


def rope_angles(spec: ir.RopeSpec, positions: I32, freqs: F32 | None) -> tuple[F64, F64]:
    """cos and sin (n, n_dims/2), multiplied by yarn's magnitude. Angle i is position * base^(-2i/n_dims) / freqs[i]."""
    pairs = np.arange(spec.n_dims // 2, dtype=np.float64)
    inverse = spec.base ** (-2.0 * pairs / spec.n_dims)
    if freqs is not None:
        inverse = inverse / freqs.astype(np.float64)
    magnitude = 1.0
    scaling = spec.scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        # YaRN, arXiv:2309.00071, section 3.2: dimensions that turn fast keep their angle, slow ones are interpolated.
        def dimension(rotations: float) -> float:
            turns = scaling.original_context / (rotations * 2 * math.pi)
            return spec.n_dims * math.log(turns) / (2 * math.log(spec.base))

        low = max(math.floor(dimension(scaling.beta_fast)), 0)
        high = min(math.ceil(dimension(scaling.beta_slow)), spec.n_dims - 1)
        slow = np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
        inverse = inverse * (1 - slow) + inverse / scaling.factor * slow
        magnitude = scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor))
    angles = positions.astype(np.float64)[:, None] * inverse
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def rope(x: F32, positions: I32, spec: ir.RopeSpec, freqs: F32 | None) -> F32:
    """Rotate the first `n_dims` values of every head of x (n, heads * head_dim)."""
    cos, sin = rope_angles(spec, positions, freqs)
    heads = x.reshape(len(positions), -1, spec.head_dim).astype(np.float64)
    half = spec.n_dims // 2
    if spec.style == "norm":
        first, second = slice(0, spec.n_dims, 2), slice(1, spec.n_dims, 2)
    else:
        first, second = slice(0, half), slice(half, spec.n_dims)
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cos[:, None] - b * sin[:, None]
    heads[..., second] = a * sin[:, None] + b * cos[:, None]
    return heads.astype(np.float32).reshape(x.shape)


def kv_store(k: F32, v: F32, cells: I32, region: KvRegion, fmt: KvFormat) -> None:
    """Write rows of k and v (n, n_values) into the cells given."""
    if len(cells) and not (cells.min() >= 0 and cells.max() < region.n_cells):
        raise RequestError(
            f"layer {region.layer}: cells {cells.min()} to {cells.max()} do not fit a KV region of {region.n_cells}"
        )
    rows = (region.n_cells, region.row_bytes)
    region.k.reshape(rows)[cells] = fmt.pack(np.ascontiguousarray(k))
    region.v.reshape(rows)[cells] = fmt.pack(np.ascontiguousarray(v))


def window_cells(window: I32, layout: int, query: int, position: int) -> npt.NDArray[np.int64]:
    """The cells a query reads, in position order."""
    if layout == 0:
        return np.arange(position + 1)
    values = window[query * layout : (query + 1) * layout]
    if layout == 2:
        return np.arange(values[0], values[1])
    return np.concatenate([np.arange(cell, cell + length) for cell, length in values.reshape(4, 2)])


def attn(op: ir.Attn, q: F32, positions: I32, window: I32, region: KvRegion, fmt: KvFormat) -> F32:
    """Attention of q (n, n_head * head_dim) over each query's rows; a query without rows gives zeros."""
    n, layout = len(q), len(window) // max(len(q), 1)
    group = op.n_head // op.n_kv_head
    out = np.zeros((n, op.n_kv_head, group, op.head_dim), np.float32)
    heads = q.reshape(n, op.n_kv_head, group, op.head_dim).astype(np.float64) * op.scale
    rows = (region.n_cells, region.row_bytes)
    for i in range(n):
        cells = window_cells(window, layout, i, int(positions[i]))
        if op.sliding is not None:
            cells = cells[-op.sliding :]
        if not len(cells):
            continue
        if cells.min() < 0 or cells.max() >= region.n_cells:
            raise RequestError(
                f"layer {region.layer}: query {i} reads cells {cells.min()} to {cells.max()} of {region.n_cells}"
            )
        in_order = np.array_equal(cells, np.arange(cells[0], cells[0] + len(cells)))
        run = slice(cells[0], cells[-1] + 1) if in_order else cells
        k = fmt.unpack(region.k.reshape(rows)[run], region.n_values).reshape(-1, op.n_kv_head, op.head_dim)
        v = fmt.unpack(region.v.reshape(rows)[run], region.n_values).reshape(-1, op.n_kv_head, op.head_dim)
        scores = np.matmul(heads[i], k.transpose(1, 2, 0).astype(np.float64))
        if op.softcap is not None:
            scores = op.softcap * np.tanh(scores / op.softcap)
        out[i] = np.matmul(softmax(scores), v.transpose(1, 0, 2).astype(np.float64))
    return out.reshape(q.shape)


def softmax(x: npt.NDArray[Any]) -> F64:
    """exp(x - max) / sum over the last axis, in f64."""
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    total: F64 = weights / weights.sum(axis=-1, keepdims=True)
    return total


def top_k(x: F32, k: int) -> I32:
    """(n, 2k + 1): indices, value bits and log-sum-exp bits of each row of x (n, d), as `ir.TopK` says."""
    keys = np.where(np.isfinite(x), x, np.inf)
    best = np.argsort(-keys, axis=-1, kind="stable")[:, :k]
    values = np.take_along_axis(x, best, axis=-1)
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Inf - Inf is the NaN that is meant
        top = wide.max(axis=-1, keepdims=True)
        total = top + np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))
    return np.concatenate([best.astype(np.int32), values.view(np.int32), total.astype(np.float32).view(np.int32)], -1)


def silu(x: F32) -> F32:
    wide = x.astype(np.float64)
    # 1 / (1 + exp(-x)) in the form that does not overflow on either side
    small = np.exp(-np.abs(wide))
    return (wide * np.where(wide >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def gelu(x: F32) -> F32:
    wide = x.astype(np.float64)
    return (0.5 * wide * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).astype(np.float32)


# --- the backend -------------------------------------------------------------------------------------------------


class ReferenceBackend(HostBackend):
    """Runs every op of the graph in numpy, with the BLAS that numpy was built on.

    `threads` bounds those of the BLAS, which are the whole process's.
    """

    caveat = "the oracle: made to be right, not fast"

    def __init__(self, kv_format: str = "f32", threads: int | None = None, *, name: str = "reference") -> None:
        super().__init__(name, kv_format)
        self._dense: dict[str, F32] = {}
        if threads is not None:
            _limit_blas(threads)

    def supports(self, node: Node) -> str | None:
        return super().supports(node) if type(node.op) in _OPS else f"no numpy function for {node.kind}"

    def bound(self, node: Node, kind: str, f32: float) -> float:
        return 0.0 if kind == "exact" else BOUND

    def facts(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def weight_bytes(self, weight: Weight) -> int:
        return 4 * math.prod(weight.shape)

    def weight(self, weight: Weight) -> F32:
        """A weight as f32, `shape` reversed."""
        found = self._dense.get(weight.name)
        if found is None:
            rows = FORMATS[weight.type].dequantize(self.data(weight))
            found = self._dense[weight.name] = rows.reshape(weight.shape[::-1])
        return found

    def compile(self, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> ReferenceProgram:
        return ReferenceProgram(self, plan, split, buffers)

    def close(self) -> None:
        super().close()
        self._dense.clear()


def _limit_blas(threads: int) -> None:
    import threadpoolctl

    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    if not len(controller):
        warnings.warn("numpy's BLAS here has no thread control; its threads are left as they are", stacklevel=2)
    controller.limit(limits=threads)


class ReferenceProgram:
    """A split as a list of numpy calls over views of its buffers."""

    def __init__(self, backend: ReferenceBackend, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> None:
        self._backend = backend

        def view(index: int) -> npt.NDArray[Any] | None:
            node = plan.graph.nodes[index]
            if node.dtype == "none":
                return None
            dtype = np.float32 if node.dtype == "f32" else np.int32
            raw: Bytes = buffers(index)[: node.nbytes]
            return raw.view(dtype).reshape(node.shape[::-1])

        self._steps = [(node.name, node.op, [view(i) for i in node.inputs], view(node.index)) for node in split.nodes]

    def run(self) -> None:
        profile = self._backend.profile
        for name, op, inputs, output in self._steps:
            start = time.perf_counter() if profile else 0.0
            try:
                value = _OPS[type(op)](self._backend, op, *inputs)
            except NumericsError as error:
                raise NumericsError(f"{name}: {error}") from None
            if output is not None:
                output[...] = value
            if profile:
                profile.add(f"{self._backend.name}: {type(op).__name__}", time.perf_counter() - start)


# --- how each op calls its function ------------------------------------------------------------------------------


def _gain(b: ReferenceBackend, norm: tuple[Weight, float]) -> tuple[F32, float]:
    return b.weight(norm[0]), norm[1]


def _optional(b: ReferenceBackend, weight: Weight | None) -> F32 | None:
    return None if weight is None else b.weight(weight)


def _embed(b: ReferenceBackend, op: ir.Embed, ids: I32) -> F32:
    rows = b.weight(op.weight)
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(rows)):
        raise RequestError(f"token ids {ids.min()} to {ids.max()} do not fit the {len(rows)} rows of {op.weight.name}")
    return rows[ids]


def _rope(b: ReferenceBackend, op: ir.Rope, x: F32, positions: I32) -> F32:
    return rope(x, positions, op.spec, _optional(b, op.spec.freqs))


def _kv_store(b: ReferenceBackend, op: ir.KvStore, k: F32, v: F32, cells: I32) -> None:
    kv_store(k, v, cells, b.regions[op.layer], b.kv_format)


def _attn(b: ReferenceBackend, op: ir.Attn, q: F32, positions: I32, window: I32) -> F32:
    return attn(op, q, positions, window, b.regions[op.layer], b.kv_format)


def _project(b: ReferenceBackend, op: ir.Project, x: F32, residual: F32 | None = None) -> F32:
    if op.norm:
        x = rms_norm(x, *_gain(b, op.norm))
    biases = op.biases or (None,) * len(op.segments)
    parts = [matmul(x, b.weight(w), _optional(b, c)) for w, c in zip(op.segments, biases, strict=True)]
    if op.epilogue in ("swiglu", "geglu"):
        return (silu if op.epilogue == "swiglu" else gelu)(parts[0]) * parts[1]
    joined = np.concatenate(parts, axis=-1)
    return joined if residual is None else residual + joined


def _head_rope_store(b: ReferenceBackend, op: ir.HeadRopeStore, qkv: F32, positions: I32, cells: I32) -> F32:
    d = op.rope.head_dim
    q, k, v = np.split(qkv, (op.n_head * d, (op.n_head + op.n_kv_head) * d), axis=-1)
    if op.biases:
        q, k, v = (x + b.weight(w) for x, w in zip((q, k, v), op.biases, strict=True))
    if op.q_norm:
        q = head_norm(q, *_gain(b, op.q_norm))
    if op.k_norm:
        k = head_norm(k, *_gain(b, op.k_norm))
    freqs = _optional(b, op.rope.freqs)
    q, k = (rope(x, positions, op.rope, freqs) for x in (q, k))
    kv_store(k, v, cells, b.regions[op.layer], b.kv_format)
    return q


def _permute(_: ReferenceBackend, op: ir.Permute, x: F32) -> F32:
    last = len(op.axes) - 1
    return x.transpose([last - axis for axis in reversed(op.axes)])


_OPS: dict[type[ir.Op], Callable[..., Any]] = {
    ir.Embed: _embed,
    ir.GetRows: lambda _b, _op, x, ids: x[ids],
    ir.RmsNorm: lambda b, op, x: rms_norm(x, b.weight(op.weight), op.eps),
    ir.HeadNorm: lambda b, op, x: head_norm(x, b.weight(op.weight), op.eps),
    ir.MatMul: lambda b, op, x: matmul(x, b.weight(op.weight), _optional(b, op.bias)),
    ir.Rope: _rope,
    ir.KvStore: _kv_store,
    ir.Attn: _attn,
    ir.Silu: lambda _b, _op, x: silu(x),
    ir.Gelu: lambda _b, _op, x: gelu(x),
    ir.Add: lambda _b, _op, x, y: x + y,
    ir.Mul: lambda _b, _op, x, y: x * y,
    ir.Scale: lambda _b, op, x: x * np.float32(op.factor),
    ir.Softmax: lambda _b, _op, x: softmax(x),
    ir.SoftCap: lambda _b, op, x: op.cap * np.tanh(x.astype(np.float64) / op.cap),
    ir.TopK: lambda _b, op, x: top_k(x, op.k),
    ir.View: lambda _b, op, x: x[..., op.start : op.start + op.size],
    ir.Reshape: lambda _b, op, x: x.reshape(op.shape[::-1]),
    ir.Permute: _permute,
    ir.SwiGLU: lambda _b, _op, gate, up: silu(gate) * up,
    ir.GeGLU: lambda _b, _op, gate, up: gelu(gate) * up,
    ir.Project: _project,
    ir.HeadRopeStore: _head_rope_store,
}
