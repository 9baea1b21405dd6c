"""The CPU backend: weights stay in the mapped file, buffers are numpy arrays, a split is a native program."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.backends.cpu import _native
from minfer.backends.cpu.lower import OPS, CpuProgram
from minfer.backends.cpu.threads import default_threads
from minfer.backends.host import HostBackend
from minfer.errors import RequestError
from minfer.graph import ir
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan

#: Largest allowed `cases.error` of each class; stated before it was measured. A product with weights in a block format
#: takes activations of 8 bits: rounding is uniform within 1/254 of a block's largest value, about 0.5% of an output's
#: size, so that the largest of a few thousand errors (4 to 5 standard deviations) stays below 5%. A gated product has
#: heavy tails: its largest value, some ten times the root mean square, errs by twice 0.5% of itself. `matmul_float` is
#: for F32, F16 and BF16 weights. Tests hold the same results to 1e-4 of products with the quantized activations.
BOUNDS: Mapping[str, float] = {
    "exact": 0.0,
    "elementwise": 1e-5,
    "norm": 1e-5,
    "rope": 1e-5,
    "matmul": 5e-2,
    "gated": 2e-1,
    "matmul_float": 1e-4,
    "attention": 1e-4,
    "kv": 2e-2,
}

MAX_HEAD_DIM = 512


class CpuBackend(HostBackend):
    """`threads` defaults to one a physical core. `MINFER_CPU` names the instruction set: portable, avx2, avx512, neon;
    unset, the best that the machine has."""

    def __init__(self, kv_format: str = "f32", threads: int | None = None, *, isa: str | None = None) -> None:
        super().__init__("cpu", kv_format)
        isa = os.environ.get("MINFER_CPU", "") if isa is None else isa
        self.workspace = _native.workspace(default_threads() if threads is None else threads, isa)
        self._vectors: dict[str, npt.NDArray[np.float32]] = {}
        self._programs: weakref.WeakSet[CpuProgram] = weakref.WeakSet()

    def supports(self, node: Node) -> str | None:
        op = node.op
        if type(op) not in OPS:
            return f"no native operation for {node.kind}"
        if isinstance(op, ir.Attn) and (op.head_dim % 8 or op.head_dim > MAX_HEAD_DIM):
            return f"a head of {op.head_dim} values; it needs a multiple of 8 up to {MAX_HEAD_DIM}"
        return super().supports(node)

    def bound(self, node: Node, kind: str, f32: float) -> float:
        if kind != "matmul":
            return BOUNDS[kind]
        if all(FORMATS[weight.type].block_size == 1 for weight in node.weights):
            return BOUNDS["matmul_float"]
        gated = isinstance(node.op, ir.Project) and node.op.epilogue in ("swiglu", "geglu")
        return BOUNDS["gated" if gated else "matmul"]

    def facts(self) -> dict[str, str]:
        return {"instruction set": self.workspace.isa, "threads": str(self.workspace.threads)}

    def weight_bytes(self, weight: Weight) -> int:
        return 0  # the mapped file is the memory

    def matrix(self, weight: Weight) -> _native.Matrix:
        """A weight in place: rows of `shape[0]` values."""
        n_in, n_out = weight.shape[0], 1
        for extent in weight.shape[1:]:
            n_out *= extent
        return _native.matrix(weight.type, self.data(weight).reshape(-1), n_in, n_out)

    def vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        """A gain, a bias or rope factors as floats, unpacked if need be: a few kilobytes a model."""
        found = self._vectors.get(weight.name)
        if found is None:
            values = FORMATS[weight.type].dequantize(self.data(weight))
            found = self._vectors[weight.name] = np.ascontiguousarray(values.reshape(-1))
        return found

    def kv(self, layer: int) -> _native.Kv:
        if layer not in self.regions:
            raise RequestError(f"layer {layer} has no KV region on {self.name}")
        r = self.regions[layer]
        return _native.kv(self.kv_format.name, r.n_cells, r.n_values, r.row_bytes, r.k, r.v)

    def compile(self, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> CpuProgram:
        program = CpuProgram(self, plan, split, buffers)
        self._programs.add(program)
        return program

    def close(self) -> None:
        for program in list(self._programs):
            program.close()
        super().close()
        self._vectors.clear()
