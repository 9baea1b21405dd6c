"""The list of op cases: every op, format, head dim and window, on both sides of every threshold of a device."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from minfer.cases.case import Case, Kind, KvFill, Value
from minfer.graph import ir
from minfer.graph.ir import RopeScaling, RopeSpec, Weight
from minfer.quants import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


#: Each product kernel of a GPU, for every weight type.
_TOKENS = (1, 2, 3, 5, 9, 33)
_HEAD_DIMS = (64, 80, 96, 128, 256, 8, 40, 248)


def _w(name: str, type_: str, *shape: int) -> Weight:
    return Weight(name, type_, shape)


def _gain(d: int, name: str = "norm.weight") -> Weight:
    return _w(name, "F32", d)


def _rows(type_: str, odd: int = 3) -> int:
    """A row length of an odd number of blocks; odd outright where a block is one value."""
    block = FORMATS[type_].block_size
    return 97 if block == 1 else odd * block


def all_cases() -> tuple[Case, ...]:
    """Every case; names are unique."""
    return tuple(
        itertools.chain(
            _row_cases(),
            _elementwise_cases(),
            _norm_cases(),
            _matmul_cases(),
            _wide_cases(),
            _tile_cases(),
            _rope_cases(),
            _kv_cases(),
            _attn_cases(),
            _project_cases(),
            _store_cases(),
            _top_cases(),
        )
    )


def _row_cases() -> Iterator[Case]:
    ids = (0, 36, 7, 7, 1)
    for type_ in FORMATS:
        weight = _w("embd.weight", type_, _rows(type_), 37)
        yield Case(f"embed/{type_}", ir.Embed(weight), (Value((5,), integers=ids),), "exact")
    yield Case("get_rows", ir.GetRows(), (Value((33, 9)), Value((3,), integers=(8, 0, 4))), "exact")
    yield Case("view", ir.View(5, 7), (Value((33, 3)),), "exact")
    yield Case("reshape", ir.Reshape((11, 3, 2)), (Value((33, 2)),), "exact")
    for axes in ((1, 0), (0, 2, 1), (2, 0, 1)):
        shape = (5, 3, 7)[: len(axes)]
        yield Case(f"permute/{''.join(map(str, axes))}", ir.Permute(axes), (Value(shape),), "exact")


def _elementwise_cases() -> Iterator[Case]:
    for n in (1, 33, 1027):
        for scale in (1.0, 30.0):
            x, y = Value((n, 3), scale), Value((n, 3), scale)
            tag = f"{n}x{scale:g}"
            yield Case(f"silu/{tag}", ir.Silu(), (x,), "elementwise")
            yield Case(f"gelu/{tag}", ir.Gelu(), (x,), "elementwise")
            yield Case(f"swiglu/{tag}", ir.SwiGLU(), (x, y), "elementwise")
            yield Case(f"geglu/{tag}", ir.GeGLU(), (x, y), "elementwise")
            yield Case(f"softmax/{tag}", ir.Softmax(), (x,), "elementwise")
            yield Case(f"softcap/{tag}", ir.SoftCap(30.0), (x,), "elementwise")
        yield Case(f"add/{n}", ir.Add(), (Value((n, 3)), Value((n, 3))), "exact")
        yield Case(f"mul/{n}", ir.Mul(), (Value((n, 3)), Value((n, 3))), "exact")
        yield Case(f"scale/{n}", ir.Scale(0.3), (Value((n, 3)),), "exact")


def _norm_cases() -> Iterator[Case]:
    for d, n, scale in ((1, 2, 1.0), (33, 1, 1.0), (576, 5, 1e-3), (640, 2, 300.0), (4097, 1, 1.0)):
        yield Case(f"rms_norm/{d}x{n}", ir.RmsNorm(_gain(d), 1e-5), (Value((d, n), scale),), "norm")
    for d in _HEAD_DIMS:
        yield Case(f"head_norm/{d}", ir.HeadNorm(_gain(d), 1e-6), (Value((3 * d, 4)),), "norm")


def _matmul_cases() -> Iterator[Case]:
    for type_ in FORMATS:
        n_in = _rows(type_)
        for n in _TOKENS:
            weight = _w("w.weight", type_, n_in, 37)
            yield Case(f"matmul/{type_}/{n_in}x37/n{n}", ir.MatMul(weight), (Value((n_in, n)),), "matmul")
        for n_in, n_out, n in ((_rows(type_, 1), 1, 1), (_rows(type_, 8), 130, 2), (_rows(type_, 5), 65, 17)):
            weight = _w("w.weight", type_, n_in, n_out)
            bias = _w("w.bias", "F32", n_out)
            op = ir.MatMul(weight, bias)
            yield Case(f"matmul_bias/{type_}/{n_in}x{n_out}/n{n}", op, (Value((n_in, n)),), "matmul")


def _wide_cases() -> Iterator[Case]:
    """One token: rows of one slice, of as many as a pass takes with Metal's threadgroup memory and with more, and
    of a block more than each; more rows than a GPU runs at a time; types that order their inputs differently."""
    edges = {"Q4_0": (1024, 5120, 6144), "Q4_K": (2048, 6144, 16384)}
    for type_, sizes in edges.items():
        for n_in in sizes:
            for n in (n_in, n_in + FORMATS[type_].block_size):
                op = ir.MatMul(_w("w.weight", type_, n, 150))
                yield Case(f"matmul/wide/{type_}/{n}x150", op, (Value((n, 1)),), "matmul")
    op = ir.MatMul(_w("w.weight", "Q4_0", 32, 40_000))
    yield Case("matmul/wide/Q4_0/32x40000", op, (Value((32, 1)),), "matmul")
    q, k, v = (_w(f"{name}.weight", type_, 2304, 50) for name, type_ in (("q", "Q8_0"), ("k", "Q4_K"), ("v", "IQ4_XS")))
    yield Case("project/wide/qkv", ir.Project((q, k, v)), (Value((2304, 1)),), "matmul")
    yield Case("project/wide/swiglu", ir.Project((q, k), None, "swiglu"), (Value((2304, 1)),), "matmul")


def _tile_cases() -> Iterator[Case]:
    """Many tokens by so many rows that a GPU takes the larger of its tiles."""
    for type_, n in (("Q8_0", 33), ("F16", 65), ("Q4_K", 65), ("Q6_K", 65)):
        op = ir.MatMul(_w("w.weight", type_, 256, 12_800))
        yield Case(f"matmul/tiles/{type_}/n{n}", op, (Value((256, n)),), "matmul")


def _rope_cases() -> Iterator[Case]:
    positions = (0, 1, 100, 5000, 20000)
    scalings = {
        "plain": None,
        "linear": RopeScaling("linear", 8.0),
        "yarn": RopeScaling("yarn", 4.0, 4096),
        "yarn_attn": RopeScaling("yarn", 40.0, 4096, attn_factor=0.8, beta_fast=16.0, beta_slow=2.0),
    }
    styles: tuple[ir.RopeStyle, ...] = ("norm", "neox")
    for style in styles:
        for name, scaling in scalings.items():
            spec = RopeSpec(style, 64, 64, 10000.0, scaling)
            yield _rope_case(f"rope/{style}/{name}", spec, positions)
        for d in _HEAD_DIMS:
            yield _rope_case(f"rope/{style}/head{d}", RopeSpec(style, d, d, 1e6), positions)
        yield _rope_case(f"rope/{style}/partial", RopeSpec(style, 80, 32, 10000.0), positions)
        freqs = _w("rope_freqs.weight", "F32", 32)
        yield _rope_case(f"rope/{style}/freqs", RopeSpec(style, 64, 64, 5e5, freqs=freqs), positions)


def _rope_case(name: str, spec: RopeSpec, positions: Sequence[int]) -> Case:
    n = len(positions)
    return Case(name, ir.Rope(spec), (Value((3 * spec.head_dim, n)), Value((n,), integers=tuple(positions))), "rope")


def _kv_cases() -> Iterator[Case]:
    for fmt in KV_FORMATS:
        for n_values, cells in ((64, (0,)), (96, (4, 2, 7)), (256, tuple(range(3, 12)))):
            kv = KvFill(n_values, 13, cells, fmt)
            n = len(cells)
            inputs = (Value((n_values, n), 3.0), Value((n_values, n)), Value((n,), integers=cells))
            kind: Kind = "kv" if fmt == "q8_0" else "exact"
            yield Case(f"kv_store/{fmt}/{n_values}x{n}", ir.KvStore(0), inputs, kind, kv)


def _attn_cases() -> Iterator[Case]:
    for fmt in KV_FORMATS:
        for d in _HEAD_DIMS:
            if d % KV_FORMATS[fmt].block:
                continue
            for n, past in ((1, 40), (5, 3), (12, 90)):
                yield causal(f"attn/{fmt}/head{d}/n{n}", d, 2, 2, n, past, fmt)
    # Groups of query heads on both sides of 1, 2, 4 and 8.
    for n_head, n_kv_head in ((1, 1), (2, 1), (9, 3), (4, 1), (5, 1), (14, 2), (8, 1), (9, 1)):
        for n, past in ((1, 0), (1, 129), (7, 60), (1, 600)):
            name = f"attn/gqa{n_head}_{n_kv_head}/n{n}+{past}"
            yield causal(name, 64, n_head, n_kv_head, n, past)
    for n in (2, 8, 9, 31, 63, 64, 65, 130):
        yield causal(f"attn/prefill{n}", 64, 2, 1, n, 0)
    # Windows of 256 rows or one more, 512, 4,096, 16,384: where GPUs split the rows, and where they do so no further.
    for length in (1, 2, 31, 32, 33, 63, 64, 65, 128, 129, 256, 257, 512, 513, 1000, 4096, 4097, 16384, 16385):
        yield causal(f"attn/decode{length}", 64, 3, 1, 1, length - 1, n_cells=length)
    # The heads of a group over rows that are split, for every shape of a row.
    for fmt in KV_FORMATS:
        for d, n_head in ((32, 7), (96, 2), (128, 7), (256, 2)):
            yield causal(f"attn/long/{fmt}/head{d}", d, n_head, 1, 2, 600, fmt)
        far = (80, 300, 0, 3, 500, 200, 400, 60, 5, 1, 0, 0, 0, 0, 0, 0)
        yield windowed(f"attn/long/{fmt}/map", 8, far, 2, fmt, None, 700)
    # Queries on both sides of the numbers from which they share rows: causal ones, and those of spans.
    for n in (8, 9, 32, 33):
        yield causal(f"attn/queries{n}", 64, 2, 1, n, 600)
        spans = tuple(v for i in range(n) for v in (20 + i, 600))
        yield windowed(f"attn/span/queries{n}", 2, spans, n, "f32", None, 600)
    for w in (1, 3, 16, 64, 500):
        yield causal(f"attn/sliding{w}/decode", 64, 2, 1, 1, 99, sliding=w)
        yield causal(f"attn/sliding{w}/prefill", 64, 2, 1, 70, 5, sliding=w)
    yield causal("attn/softcap", 64, 2, 1, 5, 30, softcap=5.0)
    yield causal("attn/large_scores", 64, 2, 1, 3, 30, scale=20.0)
    yield causal("attn/large_keys", 64, 2, 1, 3, 30, kv_scale=600.0)
    # The same of enough queries to be multiplied as matrices; rows that f16 cannot hold, and scaled queries.
    yield causal("attn/softcap/prefill", 64, 2, 1, 12, 30, softcap=5.0)
    yield causal("attn/beyond_f16/rows", 64, 2, 1, 12, 90, scale=2.0**-18, kv_scale=2.0**18)
    yield causal("attn/beyond_f16/queries", 64, 2, 1, 12, 90, "f16", scale=2.0**20, kv_scale=2.0**-20)
    # More rows (a query and a head) than a threadgroup has, of groups that do not divide them.
    for n_head, n_kv_head, fmt in ((14, 2, "f32"), (9, 1, "f16")):
        yield causal(f"attn/gqa{n_head}_{n_kv_head}/n21+60", 64, n_head, n_kv_head, 21, 60, fmt)
    for fmt in KV_FORMATS:
        yield causal(f"attn/one_row/{fmt}", 64, 2, 1, 1, 0, fmt)
        yield causal(f"attn/constant_v/{fmt}", 64, 2, 1, 1, 39_999, fmt, fill_v=0.7)
        yield causal(f"attn/few_of_many_cells/{fmt}", 64, 2, 1, 1, 699, fmt, n_cells=4100)
        yield causal(f"attn/zero_v/{fmt}", 64, 2, 1, 2, 40, fmt, fill_v=0.0)
    for fmt in KV_FORMATS:
        for sliding in (None, 5):
            tag = f"{fmt}/{'full' if sliding is None else f'sliding{sliding}'}"
            # Four queries: a run, another run, one row, none at all.
            spans = (3, 20, 40, 90, 17, 18, 8, 8)
            yield windowed(f"attn/span/{tag}", 2, spans, 4, fmt, sliding)
            # Up to four runs a query, far apart, not in cell order, some empty.
            runs = (80, 10, 0, 3, 40, 1, 90, 2, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 30, 4, 0, 0, 10, 6)
            yield windowed(f"attn/map/{tag}", 8, runs, 3, fmt, sliding)

    # Enough queries to share rows: of one sequence, of two far apart, some without rows.
    for fmt in KV_FORMATS:
        one = tuple(v for i in range(40) for v in (3, 10 + i))
        two = tuple(v for i in range(35) for v in ((5, 6 + i) if i % 3 else (700, 650 + 2 * i)))
        yield windowed(f"attn/spans/one/{fmt}", 2, one, 40, fmt, None)
        yield windowed(f"attn/spans/two/{fmt}", 2, two, 35, fmt, None, 800)
        yield windowed(f"attn/spans/sliding/{fmt}", 2, two, 35, fmt, 7, 800)


def causal(
    name: str,
    head_dim: int,
    n_head: int,
    n_kv_head: int,
    n: int,
    past: int,
    fmt: str = "f32",
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    kv_scale: float = 1.0,
    fill_v: float | None = None,
    n_cells: int | None = None,
) -> Case:
    """`n` queries after `past` rows, cells equal to positions; of `n_cells` cells, by default a few more."""
    total = past + n
    op = ir.Attn(0, n_head, n_kv_head, head_dim, scale / math.sqrt(head_dim), softcap, sliding)
    inputs = (
        Value((n_head * head_dim, n)),
        Value((n,), integers=tuple(range(past, total))),
        Value((0,), integers=()),
    )
    kv = KvFill(n_kv_head * head_dim, n_cells or total + 3, tuple(range(total)), fmt, kv_scale, fill_v)
    return Case(name, op, inputs, "attention", kv)


def windowed(
    name: str, layout: int, window: tuple[int, ...], n: int, fmt: str, sliding: int | None, n_cells: int = 100
) -> Case:
    op = ir.Attn(0, 4, 2, 64, 0.125, None, sliding)
    inputs = (
        Value((4 * 64, n)),
        Value((n,), integers=tuple(range(n))),
        Value((len(window),), integers=window),
    )
    return Case(name, op, inputs, "attention", KvFill(128, n_cells, tuple(range(n_cells)), fmt), layout)


def _project_cases() -> Iterator[Case]:
    for n in _TOKENS:
        for type_ in FORMATS:
            d = _rows(type_)
            gate, up = _w("gate.weight", type_, d, 37), _w("up.weight", type_, d, 37)
            op = ir.Project((gate, up), (_gain(d), 1e-5) if n <= 8 else None, "swiglu")  # a norm joins few tokens
            yield Case(f"project/swiglu/{type_}/n{n}", op, (Value((d, n)),), "matmul")
    for n in (*_TOKENS, 4, 8):
        q, k, v = _w("q.weight", "Q4_K", 256, 48), _w("k.weight", "Q4_K", 256, 16), _w("v.weight", "Q6_K", 256, 16)
        x = (Value((256, n)),)
        yield Case(f"project/qkv/n{n}", ir.Project((q, k, v)), x, "matmul")
        yield Case(f"project/geglu/n{n}", ir.Project((k, v), None, "geglu"), x, "matmul")
        biases = (_w("q.bias", "F32", 48), _w("k.bias", "F32", 16), _w("v.bias", "F32", 16))
        yield Case(f"project/bias/n{n}", ir.Project((q, k, v), None, "bias", biases), x, "matmul")
        yield Case(f"project/add/n{n}", ir.Project((q,), None, "add"), (*x, Value((48, n), 10.0)), "matmul")
        if n <= 8:
            yield Case(f"project/norm_qkv/n{n}", ir.Project((q, k, v), (_gain(256), 1e-6)), x, "matmul")
            yield Case(f"project/norm/n{n}", ir.Project((q,), (_gain(256), 1e-6)), x, "matmul")


def _store_cases() -> Iterator[Case]:
    cells, positions = (7, 0, 3), (5, 100, 4000)
    styles: tuple[ir.RopeStyle, ...] = ("norm", "neox")
    for style, fmt, d in itertools.product(styles, KV_FORMATS, (64, 128)):
        rope = RopeSpec(style, d, d, 10000.0)
        for biased, normed in itertools.product((False, True), repeat=2):
            biases = (
                _w("q.bias", "F32", 4 * d),
                _w("k.bias", "F32", 2 * d),
                _w("v.bias", "F32", 2 * d),
            )
            op = ir.HeadRopeStore(
                0,
                4,
                2,
                rope,
                biases if biased else None,
                (_gain(d, "q_norm.weight"), 1e-6) if normed else None,
                (_gain(d, "k_norm.weight"), 1e-6) if normed else None,
            )
            tag = f"{style}/{fmt}/head{d}{'/biased' if biased else ''}{'/normed' if normed else ''}"
            inputs = (Value((8 * d, 3)), Value((3,), integers=positions), Value((3,), integers=cells))
            kind: Kind = "rope" if fmt == "f32" else "kv"
            yield Case(f"head_rope_store/{tag}", op, inputs, kind, KvFill(2 * d, 9, cells, fmt))


def _top_cases() -> Iterator[Case]:
    for d, k, n in (
        (1, 1, 1),
        (5, 5, 2),
        (33, 1, 3),
        (1024, 8, 1),
        (1025, 40, 2),
        (5000, 1, 1),
        (5000, 64, 3),
        (1500, 1024, 1),
    ):
        yield Case(f"top_k/{d}x{n}/k{k}", ir.TopK(k), (Value((d, n), 8.0),), "elementwise")
    equal = Value((3000, 2), 3.0, step=2.0)  # a few dozen values; zeros of both signs among them
    for k in (1, 40):
        yield Case(f"top_k/equal/k{k}", ir.TopK(k), (equal,), "elementwise")
        yield Case(f"top_k/constant/k{k}", ir.TopK(k), (Value((2500, 1), fill=-1.5),), "elementwise")
        yield Case(f"top_k/low/k{k}", ir.TopK(k), (Value((2500, 1), fill=-3e38),), "elementwise")
        for odd in (math.nan, math.inf, -math.inf):
            yield Case(f"top_k/{odd}/k{k}", ir.TopK(k), (Value((3000, 2), 8.0, odd=odd),), "elementwise")
