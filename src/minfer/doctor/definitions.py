"""Every op once more, as slowly and plainly as it can be said, in f64: what the reference backend is compared with.

Written from the definitions, one value or one head at a time; it shares no code with the backends. Only the unpacking
of block formats is `quants`' own for both: tests hold it to blocks worked out by hand. Inputs and results are numpy
arrays of the reversed logical shape.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minfer.cases import Case, MemoryTensors

Array = np.ndarray[Any, Any]


def evaluate(case: Case, seed: int = 0) -> list[Array]:
    """The value of the case's op, or the K and V rows that it stores after its value."""
    arrays, tensors = case.data(seed), case.weights(seed)
    inputs = [arrays[f"x{i}"] for i in range(len(case.inputs))]
    return _EVALUATE[type(case.op)](case, _Weights(tensors), arrays, *inputs)


class _Weights:
    def __init__(self, tensors: MemoryTensors) -> None:
        self.tensors = tensors

    def __call__(self, weight: ir.Weight) -> Array:
        rows = FORMATS[weight.type].dequantize(self.tensors[weight.name]).astype(np.float64)
        return rows.reshape(weight.shape[::-1])


def each(function: Callable[..., float], *arrays: Array) -> Array:
    flat = [function(*map(float, values)) for values in zip(*(a.reshape(-1) for a in arrays), strict=True)]
    return np.array(flat).reshape(arrays[0].shape)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    total = math.fsum(powers)
    return [p / total for p in powers]


def norm(x: Array, gain: Array, eps: float) -> Array:
    d = len(gain)
    out = np.empty(x.size)
    for start in range(0, x.size, d):
        part = [float(v) for v in x.reshape(-1)[start : start + d]]
        root = math.sqrt(math.fsum(v * v for v in part) / d + eps)
        out[start : start + d] = [v / root * g for v, g in zip(part, gain, strict=True)]
    return out.reshape(x.shape)


def product(x: Array, weight: Array) -> Array:
    return np.array([(row * weight).sum(axis=1) for row in x.astype(np.float64)])


def angle(spec: ir.RopeSpec, pair: int, position: int, factor: float) -> tuple[float, float]:
    """(angle, magnitude) of a pair of values, from the papers' formulas."""
    theta = spec.base ** (-2 * pair / spec.n_dims) / factor
    scaling = spec.scaling
    if scaling is None:
        return position * theta, 1.0
    if scaling.kind == "linear":
        return position * theta / scaling.factor, 1.0
    # YaRN: a dimension whose wave turns more than beta_fast times over the original context keeps its angle; one that
    # turns less than beta_slow times is interpolated; between them the mix is linear in the dimension's number.
    edges = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        edges.append(
            spec.n_dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.base))
        )
    low, high = max(0, math.floor(edges[0])), min(spec.n_dims - 1, math.ceil(edges[1]))
    mix = min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
    angle = position * theta * ((1 - mix) + mix / scaling.factor)
    return angle, scaling.attn_factor * (1 + 0.1 * math.log(scaling.factor))


def rope(x: Array, positions: Array, spec: ir.RopeSpec, freqs: Array | None) -> Array:
    out = x.astype(np.float64).reshape(len(positions), -1, spec.head_dim).copy()
    for token, position in enumerate(positions):
        for pair in range(spec.n_dims // 2):
            a, b = (2 * pair, 2 * pair + 1) if spec.style == "norm" else (pair, pair + spec.n_dims // 2)
            phi, magnitude = angle(spec, pair, int(position), 1.0 if freqs is None else float(freqs[pair]))
            c, s = magnitude * math.cos(phi), magnitude * math.sin(phi)
            for head in out[token]:
                head[a], head[b] = head[a] * c - head[b] * s, head[a] * s + head[b] * c
    return out.reshape(x.shape)


def packed(rows: Array, fmt: str) -> Array:
    """What a KV row reads back as."""
    if fmt == "f32":
        return rows.astype(np.float32)
    if fmt == "f16":
        return rows.astype(np.float32).astype(np.float16).astype(np.float64)
    out = np.zeros(rows.shape)
    for i, row in enumerate(rows.astype(np.float32)):
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            d = np.abs(block).max() / np.float32(127)
            inverse = np.float32(1) / d if d else np.float32(0)
            stored = float(np.float16(d))
            out[i, start : start + 32] = stored * np.rint(block * inverse).astype(np.float64)
    return out


def window(case: Case, query: int, positions: Array, values: Array) -> list[int]:
    """The cells that a query reads, in order."""
    if case.window == 0:
        return list(range(int(positions[query]) + 1))
    mine = [int(v) for v in values[case.window * query : case.window * (query + 1)]]
    if case.window == 2:
        return list(range(mine[0], mine[1]))
    return [cell for i in range(0, 8, 2) for cell in range(mine[i], mine[i] + mine[i + 1])]


def attention(
    case: Case, _: _Weights, arrays: Mapping[str, Array], q: Array, positions: Array, spans: Array
) -> list[Array]:
    op, kv = case.op, case.kv
    assert isinstance(op, ir.Attn)
    assert kv
    at = {cell: row for row, cell in enumerate(kv.cells)}
    k, v = packed(arrays["kv_k"], kv.format), packed(arrays["kv_v"], kv.format)
    out = np.zeros(q.shape)
    for i in range(len(q)):
        cells = window(case, i, positions, spans)
        if op.sliding is not None:
            cells = cells[max(0, len(cells) - op.sliding) :]
        if not cells:
            continue
        for head in range(op.n_head):
            mine = slice(head * op.head_dim, (head + 1) * op.head_dim)
            group = head * op.n_kv_head // op.n_head
            theirs = slice(group * op.head_dim, (group + 1) * op.head_dim)
            scores = [op.scale * float(np.dot(q[i, mine].astype(np.float64), k[at[c], theirs])) for c in cells]
            if op.softcap is not None:
                scores = [op.softcap * math.tanh(s / op.softcap) for s in scores]
            for weight, cell in zip(softmax(scores), cells, strict=True):
                out[i, mine] += weight * v[at[cell], theirs]
    return [out]


def stored(case: Case, k: Array, v: Array, cells: Array) -> list[Array]:
    assert case.kv
    regions = []
    for rows in (k, v):
        region = np.zeros((case.kv.n_cells, case.kv.n_values))
        region[list(cells)] = packed(rows, case.kv.format)
        regions.append(region)
    return regions


def project(case: Case, w: _Weights, _: Any, x: Array, residual: Array | None = None) -> list[Array]:
    op = case.op
    assert isinstance(op, ir.Project)
    if op.norm:
        x = norm(x, w(op.norm[0]), op.norm[1])
    parts = [product(x, w(segment)) for segment in op.segments]
    if op.epilogue == "bias":
        parts = [part + w(bias) for part, bias in zip(parts, op.biases, strict=True)]
    if op.epilogue == "swiglu":
        return [each(lambda g, u: silu(g) * u, *parts)]
    if op.epilogue == "geglu":
        return [each(lambda g, u: gelu(g) * u, *parts)]
    out = np.concatenate(parts, axis=1)
    return [out if residual is None else out + residual]


def head_rope_store(case: Case, w: _Weights, _: Any, qkv: Array, positions: Array, cells: Array) -> list[Array]:
    op = case.op
    assert isinstance(op, ir.HeadRopeStore)
    d, n_q, n_kv = op.rope.head_dim, op.n_head, op.n_kv_head
    q, k, v = qkv[:, : n_q * d], qkv[:, n_q * d : (n_q + n_kv) * d], qkv[:, (n_q + n_kv) * d :]
    if op.biases:
        q, k, v = q + w(op.biases[0]), k + w(op.biases[1]), v + w(op.biases[2])
    if op.q_norm:
        q = norm(q, w(op.q_norm[0]), op.q_norm[1])
    if op.k_norm:
        k = norm(k, w(op.k_norm[0]), op.k_norm[1])
    freqs = w(op.rope.freqs) if op.rope.freqs else None
    q, k = rope(q, positions, op.rope, freqs), rope(k, positions, op.rope, freqs)
    return [q, *stored(case, k, v, cells)]


def matmul(case: Case, w: _Weights, _: Any, x: Array) -> list[Array]:
    op = case.op
    assert isinstance(op, ir.MatMul)
    return [product(x, w(op.weight)) + (w(op.bias) if op.bias else 0.0)]


def top_k(case: Case, _: _Weights, __: Any, x: Array) -> list[Array]:
    """By taking the best away k times; what is no number counts as the best."""
    op = case.op
    assert isinstance(op, ir.TopK)
    ids, values, totals = [], [], []
    for row in x:
        left = {i: float(v) if math.isfinite(v) else math.inf for i, v in enumerate(row)}
        chosen = []
        for _pick in range(op.k):
            best = max(left, key=lambda i: (left[i], -i))
            chosen.append(best)
            del left[best]
        ids.append(chosen)
        values.append([row[i] for i in chosen])
        top = max(float(v) for v in row)
        sane = all(math.isfinite(v) or v == -math.inf for v in row)
        totals.append([top + math.log(sum(math.exp(float(v) - top) for v in row)) if sane else math.nan])
    return [np.array(ids), np.array(values), np.array(totals)]


def permute(case: Case, _: _Weights, __: Any, x: Array) -> list[Array]:
    op = case.op
    assert isinstance(op, ir.Permute)
    shape = x.shape[::-1]  # logical
    out = np.zeros([shape[axis] for axis in op.axes][::-1])
    for place in np.ndindex(*shape):
        target = tuple(place[axis] for axis in op.axes)
        out[target[::-1]] = x[place[::-1]]
    return [out]


_EVALUATE: dict[type[ir.Op], Callable[..., list[Array]]] = {
    ir.Embed: lambda c, w, _, ids: [np.stack([w(c.op.weight)[i] for i in ids])],
    ir.GetRows: lambda c, w, _, x, ids: [np.stack([x[i] for i in ids])],
    ir.RmsNorm: lambda c, w, _, x: [norm(x, w(c.op.weight), c.op.eps)],
    ir.HeadNorm: lambda c, w, _, x: [norm(x, w(c.op.weight), c.op.eps)],
    ir.MatMul: matmul,
    ir.Rope: lambda c, w, _, x, p: [rope(x, p, c.op.spec, w(c.op.spec.freqs) if c.op.spec.freqs else None)],
    ir.KvStore: lambda c, w, _, k, v, cells: stored(c, k, v, cells),
    ir.Attn: attention,
    ir.Silu: lambda c, w, _, x: [each(silu, x)],
    ir.Gelu: lambda c, w, _, x: [each(gelu, x)],
    ir.Add: lambda c, w, _, x, y: [each(lambda a, b: float(np.float32(a + b)), x, y)],
    ir.Mul: lambda c, w, _, x, y: [each(lambda a, b: float(np.float32(a * b)), x, y)],
    ir.Scale: lambda c, w, _, x: [each(lambda a: float(np.float32(a * float(np.float32(c.op.factor)))), x)],
    ir.Softmax: lambda c, w, _, x: [np.array([softmax([float(v) for v in row]) for row in x])],
    ir.SoftCap: lambda c, w, _, x: [each(lambda a: c.op.cap * math.tanh(a / c.op.cap), x)],
    ir.TopK: top_k,
    ir.View: lambda c, w, _, x: [x[:, c.op.start : c.op.start + c.op.size]],
    ir.Reshape: lambda c, w, _, x: [x.reshape(-1).reshape(c.op.shape[::-1])],
    ir.Permute: permute,
    ir.SwiGLU: lambda c, w, _, g, u: [each(lambda a, b: silu(a) * b, g, u)],
    ir.GeGLU: lambda c, w, _, g, u: [each(lambda a, b: gelu(a) * b, g, u)],
    ir.Project: project,
    ir.HeadRopeStore: head_rope_store,
}
