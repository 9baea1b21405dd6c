"""The list of op cases. Tests, `bench --ops` and `doctor` run the same list on every backend.

A case is a small graph and its data; the reference backend's result is what others are compared with. `kind` names
the tolerance class: a backend states a bound for each (`BOUNDS` is for f32 arithmetic), and `exact` means bit for bit.
"""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from minfer.graph import ir
from minfer.graph.allocate import Allocator
from minfer.graph.builder import Builder
from minfer.graph.ir import GraphParams, Node, Op, Placement, RopeScaling, RopeSpec, Shape, Weight
from minfer.graph.plan import make_plan
from minfer.quants import FORMATS, KV_FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from minfer.graph import Graph

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Kind = Literal["exact", "elementwise", "norm", "rope", "matmul", "attention", "kv"]

#: Largest allowed `error` of each class for a backend that computes in f32; stated before it was measured.
BOUNDS: Mapping[Kind, float] = {
    "exact": 0.0,  # moves values
    "elementwise": 1e-5,  # one rounding, exp and tanh of another library
    "norm": 1e-5,  # a sum of up to a few thousand squares
    "rope": 1e-3,  # an f32 angle of up to 20,000 radians is off by 1e-3
    "matmul": 1e-4,  # f32 sums in another order
    "attention": 1e-4,  # two matrix products and a softmax
    "kv": 2e-2,  # a q8_0 or f16 row rounds again: a neighbouring code is allowed
}


def error(got: Array, want: Array) -> float:
    """max |got - want| over the root mean square of `want`; inf where either has NaN or Inf at different places, and
    where integers differ."""
    if got.shape != want.shape:
        return math.inf
    if np.issubdtype(want.dtype, np.integer):
        return 0.0 if np.array_equal(got, want) else math.inf
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return math.inf
    both = np.isfinite(b)
    if not both.any():
        return 0.0 if np.array_equal(a, b, equal_nan=True) else math.inf
    scale = math.sqrt(float(np.mean(b[both] ** 2)))
    return float(np.abs(a[both] - b[both]).max()) / max(scale, 1e-30)


@dataclass(frozen=True, slots=True)
class Value:
    """An input of a case: its logical shape, and its data: normal numbers times `scale`, rounded to multiples of `step`
    (equal values), `fill`, or the integers; `odd` is put at every 1,001st place."""

    shape: Shape
    scale: float = 1.0
    fill: float | None = None
    integers: tuple[int, ...] | None = None
    step: float | None = None
    odd: float | None = None


@dataclass(frozen=True, slots=True)
class KvFill:
    """KV rows stored before the op runs, into `cells` of a region of `n_cells`; `fill_v` makes V constant."""

    n_values: int
    n_cells: int
    cells: tuple[int, ...]
    format: str = "f32"
    scale: float = 1.0
    fill_v: float | None = None


@dataclass(frozen=True)
class Case:
    """One op with its inputs. `window` is the layout; what is compared is the op's value, or the KV rows it stored."""

    name: str
    op: Op
    inputs: tuple[Value, ...]
    kind: Kind
    kv: KvFill | None = None
    window: int = 0

    @property
    def kv_format(self) -> str:
        return self.kv.format if self.kv else "f32"

    def graph(self, device: str) -> Graph:
        """Inputs `x0`, `x1`, ..., the op as node `out`; before an attention, its rows are stored."""
        n_tokens = next((v.shape[-1] for v in self.inputs if v.shape and v.shape[-1]), 1)
        b = Builder(GraphParams(n_tokens, n_tokens, Placement.whole(device, 1), self.kv_format, self.window))
        with b.layer(0):
            if self.kv and isinstance(self.op, ir.Attn):
                rows = (self.kv.n_values, len(self.kv.cells))
                k, v = b.input("kv_k", rows), b.input("kv_v", rows)
                b.add_op(ir.KvStore(0), "kv_fill", k, v, b.input("kv_cells", (len(self.kv.cells),), "i32"))
            sources = [
                b.input(f"x{i}", value.shape, "f32" if value.integers is None else "i32")
                for i, value in enumerate(self.inputs)
            ]
            return b.finish(b.add_op(self.op, "out", *sources))

    def data(self, seed: int = 0) -> dict[str, Array]:
        """Input name -> array (the logical shape reversed)."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        arrays: dict[str, Array] = {}
        for i, value in enumerate(self.inputs):
            shape = value.shape[::-1]
            if value.integers is not None:
                arrays[f"x{i}"] = np.array(value.integers, np.int32).reshape(shape)
            elif value.fill is not None:
                arrays[f"x{i}"] = np.full(shape, value.fill, np.float32)
            else:
                arrays[f"x{i}"] = (rng.standard_normal(shape) * value.scale).astype(np.float32)
            if value.step is not None:
                arrays[f"x{i}"] = (np.round(arrays[f"x{i}"] / value.step) * value.step).astype(np.float32)
            if value.odd is not None:
                arrays[f"x{i}"].reshape(-1)[777::1001] = value.odd
        if self.kv and isinstance(self.op, ir.Attn):
            rows = (len(self.kv.cells), self.kv.n_values)
            for name in ("kv_k", "kv_v"):
                arrays[name] = (rng.standard_normal(rows) * self.kv.scale).astype(np.float32)
            if self.kv.fill_v is not None:
                arrays["kv_v"] = np.full(rows, self.kv.fill_v, np.float32)
            arrays["kv_cells"] = np.array(self.kv.cells, np.int32)
        return arrays

    def weights(self, seed: int = 0) -> MemoryTensors:
        """Random tensors for every weight the op names."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode()), 1])
        return MemoryTensors({w.name: random_rows(w, rng) for w in ir.weights_of(self.op)})


class MemoryTensors(dict[str, Bytes]):
    """Tensors by name, held in memory: what a backend loads weights from."""

    def data(self, name: str) -> Bytes:
        return self[name]


def random_rows(weight: Weight, rng: np.random.Generator) -> Bytes:
    """Rows of a weight as a file holds them: random codes, scales that make values of magnitude about 1."""
    fmt: Format = FORMATS[weight.type]
    n, rows = weight.shape[0], math.prod(weight.shape[1:])
    if fmt.block_size == 1:
        return fmt.quantize(rng.standard_normal((rows, n)).astype(np.float32))
    assert fmt.layout is not None
    assert fmt.layout.fields is not None
    raw = rng.integers(0, 256, (rows, fmt.row_bytes(n)), np.uint8)
    blocks = raw.view(fmt.layout)
    if weight.type == "MXFP4":
        blocks["e"] = rng.integers(124, 128, blocks.shape, np.uint8)  # a scale of 2^(e - 128)
        return raw
    scales = [name for name, entry in fmt.layout.fields.items() if entry[0] == np.dtype("<f2")]
    for name in scales:
        blocks[name] = 1.0
    rms = math.sqrt(float(np.mean(fmt.dequantize(raw).astype(np.float64) ** 2)))
    for name in scales:
        blocks[name] = rng.uniform(0.5, 1.5, blocks.shape) * rng.choice([-1, 1], blocks.shape) / rms
    return raw


def run(case: Case, backend: Any, seed: int = 0) -> list[Array]:
    """Run a case on a backend made for its KV format: the op's value (or the KV rows), numpy shape."""
    device = backend.name
    graph = case.graph(device)
    allocator = Allocator({device: backend})
    plan = make_plan(lambda _: graph, graph.params, {device: backend}, allocator)
    for node in plan.graph:
        assert node.device == device, f"{case.name}: {node.name} is not on {device}"
    backend.load_weights(case.weights(seed), ir.weights_of(case.op))
    region = None
    if case.kv:
        region = backend.add_kv_region(0, case.kv.n_cells, case.kv.n_values, KV_FORMATS[case.kv.format])
    arrays = case.data(seed)

    def buffer(index: int) -> Any:
        return allocator.buffer(plan.slots[index, device])

    programs = [backend.compile(plan, split, buffer) for split in plan.splits]
    for node in plan.graph:
        if isinstance(node.op, ir.Input):
            backend.write(buffer(node.index), arrays[node.op.kind])
    for program in programs:
        program.run()
    out = plan.graph.by_name["blk.0.out"]
    results = _read(backend, buffer(out.index), out) if out.dtype != "none" else []
    if case.kv and region is not None and not isinstance(case.op, ir.Attn):
        fmt = KV_FORMATS[case.kv.format]
        for side in (region.k, region.v):
            raw = backend.read(side, region.n_cells * region.row_bytes).reshape(region.n_cells, region.row_bytes)
            results.append(fmt.unpack(raw, region.n_values))
    allocator.close()
    return results


def _read(backend: Any, buffer: Any, node: Node) -> list[Array]:
    raw: Bytes = backend.read(buffer, node.nbytes)
    if isinstance(node.op, ir.TopK):  # its three parts
        words = raw.view(np.int32).reshape(node.shape[::-1])
        return [words[:, : node.op.k], *(part.view(np.float32) for part in np.split(words, (node.op.k, -1), -1)[1:])]
    return [raw.view(np.float32).reshape(node.shape[::-1])]


# --- the list ----------------------------------------------------------------------------------------------------

_TOKENS = (1, 2, 5, 9, 33)
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
            for n, past in ((1, 40), (5, 3)):
                yield _causal(f"attn/{fmt}/head{d}/n{n}", d, 2, 2, n, past, fmt)
    for n_head, n_kv_head in ((1, 1), (9, 3), (14, 2), (8, 1)):
        for n, past in ((1, 0), (1, 129), (7, 60)):
            name = f"attn/gqa{n_head}_{n_kv_head}/n{n}+{past}"
            yield _causal(name, 64, n_head, n_kv_head, n, past)
    for n in (2, 31, 63, 64, 65, 130):
        yield _causal(f"attn/prefill{n}", 64, 2, 1, n, 0)
    for length in (1, 2, 31, 32, 33, 63, 64, 65, 200, 1000):
        yield _causal(f"attn/decode{length}", 64, 3, 1, 1, length - 1)
    for w in (1, 3, 16, 64, 500):
        yield _causal(f"attn/sliding{w}/decode", 64, 2, 1, 1, 99, sliding=w)
        yield _causal(f"attn/sliding{w}/prefill", 64, 2, 1, 70, 5, sliding=w)
    yield _causal("attn/softcap", 64, 2, 1, 5, 30, softcap=5.0)
    yield _causal("attn/large_scores", 64, 2, 1, 3, 30, scale=20.0)
    yield _causal("attn/large_keys", 64, 2, 1, 3, 30, kv_scale=600.0)
    for fmt in KV_FORMATS:
        yield _causal(f"attn/one_row/{fmt}", 64, 2, 1, 1, 0, fmt)
        yield _causal(f"attn/constant_v/{fmt}", 64, 2, 1, 1, 39_999, fmt, fill_v=0.7)
        yield _causal(f"attn/few_of_many_cells/{fmt}", 64, 2, 1, 1, 699, fmt, n_cells=4100)
        yield _causal(f"attn/zero_v/{fmt}", 64, 2, 1, 2, 40, fmt, fill_v=0.0)
    for fmt in KV_FORMATS:
        for sliding in (None, 5):
            tag = f"{fmt}/{'full' if sliding is None else f'sliding{sliding}'}"
            # Four queries: a run, another run, one row, none at all.
            spans = (3, 20, 40, 90, 17, 18, 8, 8)
            yield _windowed(f"attn/span/{tag}", 2, spans, 4, fmt, sliding)
            # Up to four runs a query, far apart, not in cell order, some empty.
            runs = (80, 10, 0, 3, 40, 1, 90, 2, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 30, 4, 0, 0, 10, 6)
            yield _windowed(f"attn/map/{tag}", 8, runs, 3, fmt, sliding)

    # Enough queries to share rows: of one sequence, of two far apart, some without rows.
    for fmt in KV_FORMATS:
        one = tuple(v for i in range(40) for v in (3, 10 + i))
        two = tuple(v for i in range(35) for v in ((5, 6 + i) if i % 3 else (700, 650 + 2 * i)))
        yield _windowed(f"attn/spans/one/{fmt}", 2, one, 40, fmt, None)
        yield _windowed(f"attn/spans/two/{fmt}", 2, two, 35, fmt, None, 800)
        yield _windowed(f"attn/spans/sliding/{fmt}", 2, two, 35, fmt, 7, 800)


def _causal(
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


def _windowed(
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
