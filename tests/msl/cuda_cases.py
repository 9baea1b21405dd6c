"""Kernels with known answers for the CUDA text: each with its launch, its inputs and what numpy says.

test_cuda.py runs them on the software device and compiles them for two GPUs; gpu_check.py runs them on a GPU. `near` is
the class in which a GPU must agree with the software device: 0 for every bit,
else a bound relative to the largest result
(to every single one with `each`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Array = np.ndarray[Any, Any]

FOLDER = Path(__file__).parent / "cuda"
EXP = 4e-6  # math functions that differ by a few units in the last place, summed
ULPS = 1e-6


@dataclass(frozen=True)
class Case:
    """`buffers` makes the arguments in order of their slots (None: not bound), and by slot what must be in them after;
    `tolerance` is for numpy, relative to the largest value (0: equal bit for bit, or NaN in the same places)."""

    name: str
    file: str
    kernel: str
    groups: tuple[int, ...]
    threads: tuple[int, ...]
    buffers: Callable[[np.random.Generator], tuple[list[Array | None], dict[int, Array]]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[int, int] = field(default_factory=dict)
    tolerance: float = 0.0
    near: float = 0.0
    each: bool = False

    @property
    def path(self) -> Path:
        """The .metal file."""
        return FOLDER / self.file


def error(got: Array, want: Array, each: bool = False) -> float:
    """The largest difference relative to the largest magnitude, or to its own; inf where NaN or infinity differ."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if got.dtype.kind in "iu":
        return 0.0 if np.array_equal(got, want) else float("inf")
    special = ~np.isfinite(b)
    if (
        not np.array_equal(np.isnan(a), np.isnan(b))
        or not np.array_equal(a[np.isinf(b)], b[np.isinf(b)])
        or np.any(~np.isfinite(a) != special)
    ):
        return float("inf")
    a, b = a[~special], b[~special]
    size = np.abs(b) if each else np.max(np.abs(b), initial=0)
    return float(np.max(np.abs(a - b) / np.maximum(size, 1e-30), initial=0))


def bf16(x: Any) -> Array:
    """float32 rounded to bfloat, as float32."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bf16_bits(x: Any) -> Array:
    """float32 rounded to bfloat, as 16 bits."""
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16)


def f32(x: Any) -> Array:
    """float32, contiguous."""
    return np.ascontiguousarray(x, dtype=np.float32)


# ---- language.metal


def swizzles(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    a = rng.integers(-40, 40, (64, 4)).astype(np.float32)
    x, y, z, w = a[:, 1].copy(), a[:, 0].copy(), a[:, 2].copy(), a[:, 3].copy()
    z, w, y = z + 2 * x, w + 2 * x, y - 1
    packed = np.stack([z, y, x], axis=1)
    out = np.stack([z * 0.5, y, x * 2, w], axis=1)
    return [a, np.zeros_like(a), np.zeros((64, 3), np.float32)], {1: out, 2: packed}


def _s(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _integers(x: int, y: int) -> list[int]:
    u, v = x & 0xFFFFFFFF, y & 0xFFFFFFFF
    r = v % 32
    hi = 2**31 - 1
    low = u & 0xFFFF
    sx, sy = _s(x, 8), _s(y, 8)
    bytes_ = [x & 255, y & 255, x >> 8 & 255, y >> 8 & 255]
    c = [x & 255, y & 255, (x + y) & 255]
    mask = 127 << 3
    return [
        u.bit_count(), 32 - u.bit_length(), (low & -low).bit_length() - 1 if low else 16, int(f"{u:032b}"[::-1], 2),
        (u << r | u >> (32 - r)) & 0xFFFFFFFF, (x * y) >> 32, (u * v) >> 32, abs(x - y), max(-(2**31), min(hi, x + y)),
        max(0, u - v),
        _s(x >> 5, 9), (u & ~mask) | (v << 3 & mask), (x + y) >> 1, y if x < y else x, max(-5000, min(70000, x)),
        _s(abs(_s(x, 16)), 16),
        (x * 7919 * y * 104729) >> 64, max(-128, min(127, sx + sy)), sum(b << 8 * i for i, b in enumerate(bytes_)),
        _s((u & 0xFFFF) | (v & 0xFFFF) << 16, 32) >> (v & 15), (x & 255) * (y & 255) + (y & 255) * 2 + 3,
        (x > 0 and y > 0) + 2 * (x < 0 or y < 0), (u << 20 ^ v) % 1000003,
        sum((b << 1 & 255) << 8 * i for i, b in enumerate(c)),
    ]  # fmt: skip


def integers(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    edge = np.array([0, 1, -1, 2**31 - 1, -(2**31), 65536, -32768, 255], np.int64)
    a = np.concatenate([edge, rng.integers(-(2**31), 2**31, 56)]).astype(np.int32)
    b = np.concatenate([edge[::-1], rng.integers(-(2**31), 2**31, 28), rng.integers(-40, 40, 28)]).astype(np.int32)
    want = np.array([_integers(int(x), int(y)) for x, y in zip(a, b, strict=True)], dtype=object)
    return [a, b, np.zeros((64, 24), np.int64)], {2: want.astype(np.int64)}


def halves(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    a = np.concatenate([[0, -0.0, 6e-8, 65504, 1e-5, 1, -3, np.inf], rng.standard_normal(56) * 9]).astype(np.float16)
    b = f32(np.concatenate([[1e-9, 3, 2, 65519.9, 6e-5, 2049, 1, 3], rng.standard_normal(56) * 3]))
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = a, b.astype(np.float16)
        p = x * y
        half = np.float16(0.5)
        h = np.stack([p, p + y, x / (y + np.float16(2)), -x, x * half - y * half, np.maximum(x, y)], axis=1)
        s = bf16(b)
        t = bf16(s * bf16(x.astype(np.float32)))
        g = np.stack([t, bf16(t - s), bf16(np.float32(1) / s)], axis=1)
        wide = x.astype(np.float32)
        dots = np.float16(
            np.float16(np.float16(x * np.float16(1)) + y * np.float16(2)) + np.float16(1) * y
        ) + x * np.float16(0)
        f = np.stack(
            [
                f32(x * np.float16(2)) + b,
                s + np.where(b > 0, wide, b),
                np.where(x < y, 1, np.where(x == y, 0, -1)),
                f32(dots),
            ],
            axis=1,
        )
    return [a, b, np.zeros((64, 6), np.float16), np.zeros((64, 3), np.uint16), np.zeros((64, 4), np.float32)], {
        2: h, 3: bf16_bits(g), 4: f32(f),
    }  # fmt: skip


def _floats(rng: np.random.Generator, n: int, spread: float) -> Array:
    return f32(rng.standard_normal(n) * spread)


def exact_math(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    n = 128
    x, y = _floats(rng, n, 4), _floats(rng, n, 2)
    x[:6] = [0.5, -0.5, 1.5, -2.5, 3.0, 0.0]
    one = np.float32(1)
    frac, whole = np.modf(x)
    mantissa, exponent = np.frexp(y)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = [
            np.sqrt(np.abs(x)), np.rint(x), np.floor(x) + 2 * np.ceil(y) + 4 * np.trunc(x),
            np.copysign(np.floor(np.abs(x) + 0.5), x),
            (x.astype(np.longdouble) * y + 1.5), x * y + np.float32(1.5), x / y, np.fmod(x, y), x * 8 + mantissa,
            exponent,
            np.copysign(x, y) + np.sign(y), x + (y - x) * np.float32(0.25), np.clip(x, -1, 1) + np.clip(y, 0, 1),
            x + np.minimum(x, y),
            frac, whole + (x >= 0), np.isnan(x / np.float32(0)) + 2.0 * (y != 0) + 4,
            np.minimum(x - np.floor(x), np.float32(0.99999994)) + np.maximum(x - y, 0),
            one / np.sqrt(np.abs(y)), np.sqrt(3 * x * (3 * x) + 4 * x * (4 * x)),
        ]  # fmt: skip
    return [x, y, np.zeros((20, n), np.float32), np.uint32([n])], {
        2: f32(np.stack([r.astype(np.float32) for r in rows]))
    }


def near_math(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    n = 128
    x = np.clip(_floats(rng, n, 3), -7.9, 7.9)
    x[:2] = [0, 1]
    p, u = np.abs(x) + np.float32(0.01), x / 8
    d, q, v = (a.astype(np.float64) for a in (x, p, u))
    rows = [
        np.exp(d), np.exp2(d), np.log(q), np.log2(q), np.sin(d), np.cos(d), np.tan(v), np.tanh(d), q**d, np.arcsin(v),
        np.arctan2(d, q),
        np.sin(d) * np.cos(d), np.sinh(d), 10**v, np.exp(v) * np.log(q), np.log10(q),
    ]  # fmt: skip
    return [x, np.zeros((16, n), np.float32), np.uint32([n])], {1: f32(np.stack(rows))}


def declarations(
    kind: str, extra: int | None
) -> Callable[[np.random.Generator], tuple[list[Array | None], dict[int, Array]]]:
    def make(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
        n, size = 30, 40
        args = np.zeros(1, np.dtype([("n", "<i4"), ("factor", "<f4"), ("v", "<f4", 3)]))
        args["n"], args["factor"], args["v"] = n, 2.75, [7, 8, 9]
        values = rng.integers(-99, 99, size).astype(np.float32)
        i = np.arange(size)
        table = [1.5, -2.0, 0.25, 1e3]
        count = 4 if kind == "float" else 5
        tiny = np.float16([0.5, 65504, 6e-8]).astype(np.float32)
        scale = np.float32(1.1)
        out = np.stack([
            np.full(size, sum(0.5 * table[k % 4] for k in range(count)) + 6),
            np.full(size, scale * scale if kind == "float" else -scale),
            i + 4 * tiny[i % 3], np.full(size, 4 if kind == "float" else 20),
            np.array([-1, 1, -1, 1, 1, -1, 1, -1])[i % 8] * np.where(i % 2, 5, 3),
            np.where(i % 2, 0, np.float32(0x12345678)), values + extra if extra is not None else np.full(size, 2.75),
            np.array([7, 8, 9])[i % 3],
        ], axis=1)  # fmt: skip
        out[n:] = 0
        return [args, values if extra is not None else None, np.zeros((size, 8), np.float32)], {2: f32(out)}

    return make


def builtins(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    groups, threads = (2, 3, 2), (5, 4, 3)
    total = [g * t for g, t in zip(groups, threads, strict=True)]
    out = np.zeros((total[2], total[1], total[0], 24), np.uint32)
    for z in range(total[2]):
        for y in range(total[1]):
            for x in range(total[0]):
                tx, ty, tz = x % 5, y % 4, z % 3
                k = tx + 5 * (ty + 4 * tz)
                out[z, y, x] = [
                    x,
                    y,
                    z,
                    x // 5,
                    y // 4,
                    z // 3,
                    tx,
                    ty,
                    tz,
                    5,
                    4,
                    3,
                    4,
                    6,
                    2,
                    3,
                    k,
                    k % 32,
                    k // 32,
                    2,
                    32,
                    k // 4,
                    k % 4,
                    2,
                ]
    return [np.zeros_like(out)], {0: out}


# ---- simd.metal


def _tree(values: list[Any], live: list[bool], f: Callable[[Any, Any], Any]) -> Any:
    v, on = list(values), list(live)
    step = 16
    while step:
        for i in range(step):
            if on[i + step]:
                v[i] = f(v[i], v[i + step]) if on[i] else v[i + step]
                on[i] = True
        step //= 2
    return v[0]


def reductions(size: int, skip: int) -> Callable[[np.random.Generator], tuple[list[Array | None], dict[int, Array]]]:
    def make(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
        n = 2 * size
        x = _floats(rng, n, 1)
        f, k = np.zeros((n, 5), np.float32), np.zeros((n, 8), np.int32)
        bits = x.view(np.int32)
        for start in [g * size + s for g in range(2) for s in range(0, size, 32)]:
            lanes = range(start, min(start + 32, (start // size + 1) * size))
            live = [i < len(lanes) and i % 8 >= skip for i in range(32)]
            on = [lanes[i] for i in range(32) if live[i]]
            full = np.zeros(32, np.float32)
            full[: len(lanes)] = x[lanes]
            h = full.astype(np.float16)
            with np.errstate(over="ignore"):
                row = [
                    _tree(list(full), live, lambda a, b: np.float32(a + b)), max(x[on]), min(x[on]),
                    _tree(list(full), live, lambda a, b: np.float32(a * b)),
                    np.float32(_tree(list(h), live, lambda a, b: np.float16(a + b))),
                ]  # fmt: skip
            ballot = sum(1 << i for i in range(32) if live[i] and full[i] > 0)
            b = bits[on]
            prefix = 0
            for i in on:
                f[i] = row
                low = int(bits[i]) & 255
                both = (prefix + low) * 65536 + prefix
                k[i] = [
                    np.bitwise_and.reduce(b), np.bitwise_or.reduce(b), np.bitwise_xor.reduce(b), int(np.sum(b & 1023)),
                    _s(ballot, 32),
                    int(np.all(x[on] > -9)) + 2 * int(np.any(x[on] > 1)) + 4 * (i == on[0]), b[0], _s(both, 32),
                ]  # fmt: skip
                prefix += low
        return [x, np.zeros_like(f), np.zeros_like(k), np.uint32([skip])], {1: f, 2: k}

    return make


def shuffles(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x = rng.integers(-1000, 1000, 64).astype(np.int32)
    out = np.zeros((64, 16), np.int32)
    for i in range(64):
        lane, base = i % 32, i - i % 32
        g, quad = x[base : base + 32], x[i - i % 4 : i - i % 4 + 4]
        out[i] = [
            g[31 - lane], g[lane ^ 5], g[lane - 3] if lane >= 3 else 0, g[lane + 4] if lane < 28 else 0,
            g[(lane - 7) % 32], g[(lane + 9) % 32],
            g[11], 4 * g[lane ^ 1] + 6, 4, sum(quad), quad[(i % 4) ^ 2], quad[1],
            sum(int(q) & 7 for q in quad[: i % 4]),
            g[lane - 5] if lane >= 5 else -g[32 + lane - 5], g[lane + 5] if lane < 27 else -g[lane + 5 - 32],
            max(quad) + 20,
        ]  # fmt: skip
    return [x, np.zeros_like(out)], {1: out}


def tiles(kind: str) -> Callable[[np.random.Generator], tuple[list[Array | None], dict[int, Array]]]:
    cast = {"float": f32, "half": lambda x: np.float16(x), "bfloat": bf16_bits}[kind]
    wide = {"float": f32, "half": lambda x: f32(np.float16(x)), "bfloat": bf16}[kind]

    def make(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
        a, b = _floats(rng, 12 * 24, 1), _floats(rng, 8 * 16 + 16, 1)
        ma = wide(a).reshape(12, 24)[2:10, 3:11]
        mb = wide(b)[5 : 5 + 8 * 16].reshape(8, 16)[:, :8].T
        acc = ma.copy()
        for left, right in ((ma, mb), (mb, ma)):
            for k in range(8):
                acc = acc + left[:, k : k + 1] * right[k : k + 1, :]
        c = np.zeros((10, 10), np.float32)
        c[1:9, 1:9] = acc
        scaled = wide(2 * ma)
        for lane in range(32):
            scaled[(lane >> 4) * 4 + (lane >> 1) % 4, (lane >> 3) % 2 * 4 + lane % 2 * 2] = lane
        out = np.ascontiguousarray(cast(scaled.T))
        return [cast(a), cast(b), np.zeros_like(c), np.zeros_like(out)], {2: c, 3: out}

    return make


def atomics(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x = rng.integers(0, 5000, 4 * 96).astype(np.uint32)
    out = np.array([10**6, -(10**6), -1, 0, 0, 5, 0, 0], np.int32)
    folded = int(np.bitwise_xor.reduce((x * np.uint32(7919)).astype(np.uint32)))
    want = np.array([
        int(x.min()) - 500, x.max(), _s(int(np.bitwise_and.reduce(x | 0xFF00)), 32), np.bitwise_or.reduce(x),
        _s(folded, 32), 5 - 2 * len(x), 77, 0,
    ]).astype(np.int32)  # fmt: skip
    bins = np.bincount(x % 16, minlength=16).astype(np.uint32)
    return [x, np.zeros(16, np.uint32), out, np.zeros(1, np.float32), np.uint32([1])], {
        1: bins, 2: want, 3: f32([x.sum()]), 4: np.uint32([1 + 3 * len(x)]),
    }  # fmt: skip


def memories(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x = rng.integers(-50, 50, (3, 8, 32)).astype(np.float32)
    y, lane = np.mgrid[0:8, 0:32]
    quads = np.zeros((3, 64, 4), np.float32)
    for r in range(8):
        for t in range(8):
            quads[:, r * 8 + t] = x[:, t, [r, r + 8, r + 16, r + 24]]
    sums = x.sum(axis=2)
    out = quads[:, lane, y % 4] + sums[:, (lane + y) % 8] + (lane % 4) + (lane % 3)
    return [x, np.zeros_like(x)], {1: f32(out)}


# ---- model.metal


def rms_norm(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x, g = _floats(rng, 5 * 576, 2).reshape(5, 576), _floats(rng, 576, 1)
    d = x.astype(np.float64)
    want = d / np.sqrt((d * d).mean(axis=1, keepdims=True) + 1e-5) * g
    return [x, g, np.zeros_like(x), np.int32([576]), f32([1e-5])], {2: f32(want)}


def mul_mv(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    n, k = 37, 576
    block = np.zeros((n, k // 32), np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]))
    block["d"], block["m"] = rng.uniform(0.01, 0.1, block.shape), rng.uniform(-1, 0, block.shape)
    block["qs"] = rng.integers(0, 256, (*block.shape, 16))
    x = _floats(rng, k, 1)
    q = np.concatenate([block["qs"] & 15, block["qs"] >> 4], axis=2).astype(np.float64)
    w = (q * block["d"].astype(np.float64)[..., None] + block["m"].astype(np.float64)[..., None]).reshape(n, k)
    return [block, x, np.zeros(n, np.float32), np.int32([k]), np.int32([n])], {2: f32(w @ x.astype(np.float64))}


def mul_mm(m: int, n: int, k: int) -> Callable[[np.random.Generator], tuple[list[Array | None], dict[int, Array]]]:
    def make(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
        a, b = _floats(rng, m * k, 1).reshape(m, k).astype(np.float16), _floats(rng, n * k, 1).reshape(n, k)
        want = a.astype(np.float64) @ b.astype(np.float16).astype(np.float64).T
        return [a, b, np.zeros((m, n), np.float32), np.int32([m, n, k, 0])], {2: f32(want)}

    return make


def attention(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    heads, n = 3, 41
    q = _floats(rng, heads * 64, 1).reshape(heads, 64)
    k, v = (_floats(rng, heads * n * 64, 1).reshape(heads, n, 64).astype(np.float16) for _ in range(2))
    s = np.einsum("hd,hnd->hn", q.astype(np.float64), k.astype(np.float64)) / 8
    p = np.exp(s - s.max(axis=1, keepdims=True))
    want = np.einsum("hn,hnd->hd", p / p.sum(axis=1, keepdims=True), v.astype(np.float64))
    return [q, k, v, np.zeros_like(q), np.int32([n])], {3: f32(want)}


def rope(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x, position = _floats(rng, 6 * 64, 1).reshape(6, 64), np.int32([0, 1, 2, 7, 100, 500])
    angle = position[:, None] * 1e4 ** (-2.0 * np.arange(32) / 64)
    a, b = x[:, :32].astype(np.float64), x[:, 32:].astype(np.float64)
    want = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=1)
    return [x, position, f32([1e4]), np.int32([64])], {0: f32(want)}


def arg_max(rng: np.random.Generator) -> tuple[list[Array | None], dict[int, Array]]:
    x = rng.integers(0, 50, (4, 777)).astype(np.float32)
    return [x, np.zeros(4, np.int32), np.int32([777])], {1: x.argmax(axis=1).astype(np.int32)}


_CONSTANTS = {"FLAG": True, "COUNT": 3, "SCALE": 1.1}
CASES = [
    Case("swizzles", "language.metal", "swizzles", (2,), (32,), swizzles),
    Case("integers", "language.metal", "integers", (2,), (32,), integers),
    Case("halves", "language.metal", "halves", (2,), (32,), halves),
    Case("exact_math", "language.metal", "exact_math", (4,), (32,), exact_math),
    Case("near_math", "language.metal", "near_math", (4,), (32,), near_math, tolerance=ULPS, near=ULPS, each=True),
    Case("declarations", "language.metal", "declarations_float", (1,), (40,), declarations("float", None), _CONSTANTS),
    Case(
        "declarations, optional buffer",
        "language.metal",
        "declarations_half",
        (1,),
        (40,),
        declarations("half", 11),
        {**_CONSTANTS, "EXTRA": 11},
    ),
    Case("builtins", "language.metal", "builtins", (2, 3, 2), (5, 4, 3), builtins),
    Case("reductions", "simd.metal", "reductions", (2,), (96,), reductions(96, 0)),
    Case("reductions, partial simdgroup", "simd.metal", "reductions", (2,), (80,), reductions(80, 0)),
    Case("reductions, lanes that left", "simd.metal", "reductions", (2,), (64,), reductions(64, 3)),
    Case("shuffles", "simd.metal", "shuffles", (2,), (32,), shuffles),
    Case("tiles, float", "simd.metal", "tiles_float", (1,), (32,), tiles("float")),
    Case("tiles, half", "simd.metal", "tiles_half", (1,), (32,), tiles("half")),
    Case("tiles, bfloat", "simd.metal", "tiles_bfloat", (1,), (32,), tiles("bfloat")),
    Case("atomics", "simd.metal", "atomics", (4,), (96,), atomics),
    Case("memories", "simd.metal", "memories", (3,), (32, 8), memories, memory={0: 64 * 16, 1: 32}),
    Case("rms_norm", "model.metal", "rms_norm", (5,), (192,), rms_norm, tolerance=ULPS),
    Case("mul_mv_q4_1, 2 rows", "model.metal", "mul_mv_q4_1_2_2", (10,), (64,), mul_mv, tolerance=ULPS),
    Case("mul_mv_q4_1, 1 row", "model.metal", "mul_mv_q4_1_1_4", (10,), (128,), mul_mv, tolerance=ULPS),
    Case(
        "mul_mm_f16", "model.metal", "mul_mm_f16", (3, 2), (128,), mul_mm(64, 96, 64), {"RAGGED": False}, tolerance=ULPS
    ),
    Case(
        "mul_mm_f16, ragged",
        "model.metal",
        "mul_mm_f16",
        (2, 2),
        (128,),
        mul_mm(33, 50, 70),
        {"RAGGED": True},
        tolerance=ULPS,
    ),
    Case("attention", "model.metal", "attention", (3,), (32,), attention, tolerance=EXP, near=EXP),
    Case("rope", "model.metal", "rope", (1, 6), (32,), rope, tolerance=1e-4, near=1e-5),
    Case("arg_max", "model.metal", "arg_max", (4,), (32,), arg_max),
]
