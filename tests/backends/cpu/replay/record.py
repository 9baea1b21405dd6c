"""Writes every op case as the native calls it lowers to, with the oracle's results: what `replay.cpp` runs and checks.

    python record.py OUT [substring of case names]

So the kernels of another instruction set, or of a build with sanitizers, meet the same cases without a Python there.
A value is a tag and its data: i int64, d double, s string, b buffer number, v floats, w matrix, k KV rows, l list,
n none.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from native import FLOATS, product

from minfer import cases
from minfer.backends.cpu import CpuBackend, lower
from minfer.backends.reference import ReferenceBackend, top_k
from minfer.graph import ir
from minfer.quants import KV_FORMATS

if TYPE_CHECKING:
    from minfer.cases import Case

#: Products are held to those with the rounded activations, relative to the size of an output.
PRODUCT = 2e-5


class Handle:
    def __init__(self, *fields: Any) -> None:
        self.fields = fields


class Recorder:
    """Stands in for the native module: keeps calls instead of making them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.n_tables = 0

    def matrix(self, *fields: Any) -> Handle:
        return Handle("w", *fields)

    def kv(self, *fields: Any) -> Handle:
        return Handle("k", *fields)

    def Program(self, _: Any) -> Recorder:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            self.n_tables += name == "rope_table"
            return self.n_tables - 1

        return call


class Writer:
    """One case: buffers found by address, then calls, then checks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buffers: list[np.ndarray[Any, Any]] = []
        self.before: list[bytes] = []

    def number(self, array: np.ndarray[Any, Any]) -> int:
        for i, known in enumerate(self.buffers):
            if _address(known) == _address(array) and (known.nbytes == array.nbytes or array.nbytes == 0):
                return i
        self.buffers.append(array)
        self.before.append(array.tobytes())
        return len(self.buffers) - 1

    def value(self, x: Any) -> bytes:
        if x is None:
            return b"n"
        if isinstance(x, (bool, int, np.integer)):
            return b"i" + struct.pack("<q", int(x))
        if isinstance(x, float):
            return b"d" + struct.pack("<d", x)
        if isinstance(x, str):
            return b"s" + _text(x)
        if isinstance(x, Handle):
            return x.fields[0].encode() + b"".join(self.value(field) for field in x.fields[1:])
        if isinstance(x, (list, tuple)):
            return b"l" + struct.pack("<q", len(x)) + b"".join(map(self.value, x))
        if x.dtype == np.float32:
            return b"v" + struct.pack("<q", len(x)) + x.tobytes()
        return b"b" + struct.pack("<q", self.number(x))


def _text(x: str) -> bytes:
    return struct.pack("<q", len(x)) + x.encode()


def expected(case: Case, backend: CpuBackend) -> tuple[list[np.ndarray[Any, Any]], float]:
    """What the case gives, and how far from it (times the root mean square) a result may be."""
    if isinstance(case.op, ir.MatMul) and case.op.weight.type not in FLOATS:
        want = product(case.data()["x0"], case.op.weight, case.weights()[case.op.weight.name])
        size = np.sqrt(case.op.weight.shape[0]) / max(np.sqrt(np.mean(want**2)), 1e-30)
        if case.op.bias:
            want = want + case.weights()[case.op.bias.name].view(np.float32).reshape(-1)
        return [want.astype(np.float32)], PRODUCT * max(size, 1.0)
    found = cases.run(case, ReferenceBackend(case.kv_format))
    if isinstance(case.op, ir.TopK):
        found = [np.concatenate(found, axis=-1, dtype=np.float32, casting="unsafe")]
    return found, backend.bound(case.graph("cpu").nodes[-1], case.kind, cases.BOUNDS[case.kind])


class _Tap(CpuBackend):
    """A backend whose matrices and KV rows are handles, and which notes what is written to buffers and read back."""

    def __init__(self, case: Case, recorder: Recorder) -> None:
        super().__init__(case.kv_format, 1)
        self.recorder = recorder
        self.written: dict[int, bytes] = {}
        self.outputs: list[np.ndarray[Any, Any]] = []

    def matrix(self, weight: ir.Weight) -> Any:
        n_out = int(np.prod(weight.shape[1:]))
        return self.recorder.matrix(weight.type, self.data(weight).reshape(-1), weight.shape[0], n_out)

    def kv(self, layer: int) -> Any:
        r = self.regions[layer]
        return self.recorder.kv(self.kv_format.name, r.n_cells, r.n_values, r.row_bytes, r.k, r.v)

    def write(self, buffer: Any, data: Any) -> None:
        self.written[_address(buffer)] = np.ascontiguousarray(data).tobytes()

    def read(self, buffer: Any, nbytes: int) -> Any:
        self.outputs.append(buffer[:nbytes])
        return super().read(buffer, nbytes)


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def record(case: Case, best: int = 0) -> bytes:
    """A case; of plain products with `best`, only so many of the largest, ranked by the same operation."""
    recorder, writer = Recorder(), Writer(case.name)
    backend = _Tap(case, recorder)
    native, lower._native = lower._native, recorder
    try:
        cases.run(case, backend)
        sides = {_address(side) for r in backend.regions.values() for side in (r.k, r.v)}
    finally:
        lower._native = native
    calls = [(name, args) for name, args in recorder.calls if name != "run"]
    want, bound = expected(case, backend)
    if best:
        ((name, args),) = calls
        ranked = np.zeros(4 * len(want[0]) * (2 * best + 1), np.uint8)
        calls, backend.outputs = [(name, (*args[:-2], best, ranked))], [ranked]
        words = top_k(want[0].astype(np.float32), best)
        want = [np.concatenate([words[:, :best], words[:, best:].view(np.float32)], -1, dtype=np.float32)]
    body = struct.pack("<q", len(calls))
    for name, args in calls:
        body += _text(name) + struct.pack("<q", len(args)) + b"".join(map(writer.value, args))
    checks = struct.pack("<q", len(want))
    for array, buffer in zip(want, backend.outputs, strict=True):
        rows = array.astype(np.float32).reshape(-1, array.shape[-1])
        fmt = case.kv_format if _address(buffer) in sides else "f32"
        read_as = "top_k" if best or isinstance(case.op, ir.TopK) else fmt
        checks += struct.pack("<q", writer.number(buffer)) + _text(read_as)
        checks += struct.pack("<qqqd", *rows.shape, KV_FORMATS[fmt].row_bytes(rows.shape[1]), bound) + rows.tobytes()
    head = _text(case.name) + struct.pack("<q", len(writer.buffers))
    for array, before in zip(writer.buffers, writer.before, strict=True):
        data = backend.written.get(_address(array), before)[: len(before)].ljust(len(before), b"\0")
        head += struct.pack("<q", len(data)) + data
    return head + body + checks


def main() -> None:
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    chosen = [case for case in cases.all_cases() if part in case.name]
    with Path(sys.argv[1]).open("wb") as file:
        plain = [case for case in chosen if isinstance(case.op, ir.MatMul) and not case.op.bias]
        file.write(struct.pack("<q", len(chosen) + len(plain)))
        for case in chosen:
            file.write(record(case))
        for case in plain:
            file.write(record(case, best=min(3, case.op.weight.shape[1])))
    print(f"{len(chosen) + len(plain)} cases written to {sys.argv[1]}")


if __name__ == "__main__":
    main()
