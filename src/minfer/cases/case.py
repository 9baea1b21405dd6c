"""A case: one op with its data, and the error that a result may have."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from minfer.graph import ir
from minfer.graph.builder import Builder
from minfer.graph.ir import GraphParams, Op, Placement, Shape, Weight
from minfer.quants import FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

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
