"""How fast a device is: memory bandwidth, and each kind of kernel, as medians of repeated runs.

A shape is run small first; where that promises that the large one is done soon, the large one is what is reported. A
device whose speed says little anyway (`Backend.caveat`) runs the small ones.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minfer import cases
from minfer.backends import open_backend
from minfer.backends.base import Check
from minfer.cases import Case, KvFill, MemoryTensors, Value, random_rows
from minfer.errors import UnsupportedError
from minfer.graph import ir
from minfer.graph.ir import RopeSpec, Weight
from minfer.quants import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minfer.backends.base import Backend, Program, Values

ROUNDS = 7
#: Runs of a round are sent together, so many that a round takes about this long; a queue bounds their number.
ROUND_S, MOST_RUNS = 0.01, 16
#: Longest that a large shape may promise to take.
LARGE_S = 0.2
#: Weight types whose one-token product is timed.
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


@dataclass(frozen=True)
class Shape(Case):
    """A case of one size, with the bytes that it must move and the floating-point operations that it must do."""

    nbytes: int = 0
    flops: int = 0

    def weights(self, seed: int = 0) -> MemoryTensors:
        """Weights whose rows repeat: random ones by the million would take longer than the measurement."""
        tensors = MemoryTensors()
        for weight in ir.weights_of(self.op):
            n, rows = weight.shape[0], math.prod(weight.shape[1:])
            some = random_rows(Weight(weight.name, weight.type, (n, min(rows, 16))), np.random.default_rng(seed))
            tensors[weight.name] = np.resize(some, (rows, some.shape[1]))
        return tensors


def shapes(*, large: bool) -> tuple[Shape, ...]:
    """One list for all devices: of the size of a model's layer, or small enough for a software device."""
    d, rows, many = (4096, 4096, 512) if large else (256, 512, 32)
    heads, kv_heads, head_dim = (32, 8, 128) if large else (4, 2, 64)
    n = 1 << 24 if large else 1 << 16
    found = [Shape("memory", ir.Scale(0.5), (Value((n, 1), fill=1.0),), "exact", nbytes=8 * n)]
    found += [_product(type_, d, 4 * d, 1) for type_ in TYPES]
    found += [_product("Q4_K", d, d, tokens) for tokens in (2, 4, 8, many)]
    found.append(
        Shape(f"rms_norm, {d} x {many}", ir.RmsNorm(_f32(d), 1e-5), (Value((d, many)),), "norm", nbytes=8 * d * many)
    )
    found.append(
        Shape(f"swiglu, {d} x {many}", ir.SwiGLU(), (Value((d, many)),) * 2, "elementwise", nbytes=12 * d * many)
    )
    fmt = KV_FORMATS["f16"]
    width = (heads + 2 * kv_heads) * head_dim
    kv_row = 2 * fmt.row_bytes(kv_heads * head_dim)
    for tokens in (1, many):
        cells = tuple(range(tokens))
        found.append(
            Shape(
                f"heads, rope and KV rows, {_tokens(tokens)}",
                ir.HeadRopeStore(0, heads, kv_heads, RopeSpec("neox", head_dim, head_dim, 1e6)),
                (Value((width, tokens)), Value((tokens,), integers=cells), Value((tokens,), integers=cells)),
                "kv",
                KvFill(kv_heads * head_dim, tokens, cells, "f16"),
                nbytes=tokens * (8 * heads * head_dim + 8 * kv_heads * head_dim + kv_row),
            )
        )
        found.append(
            Shape(
                f"attention over {rows} f16 rows, {_tokens(tokens)}",
                ir.Attn(0, heads, kv_heads, head_dim, head_dim**-0.5, None, None),
                (
                    Value((heads * head_dim, tokens)),
                    Value((tokens,), integers=tuple(range(rows - tokens, rows))),
                    Value((0,), integers=()),
                ),
                "attention",
                KvFill(kv_heads * head_dim, rows, (0,), "f16"),  # the other rows are zero
                nbytes=8 * heads * head_dim * tokens + rows * kv_row,
                flops=4 * heads * head_dim * sum(range(rows - tokens + 1, rows + 1)),
            )
        )
    return tuple(found)


def _product(type_: str, n_in: int, n_out: int, tokens: int) -> Shape:
    weight = Weight("w.weight", type_, (n_in, n_out))
    return Shape(
        f"{type_} {n_in} x {n_out}, {_tokens(tokens)}",
        ir.MatMul(weight),
        (Value((n_in, tokens)),),
        "matmul",
        nbytes=n_out * FORMATS[type_].row_bytes(n_in) + 4 * tokens * (n_in + n_out),
        flops=2 * n_in * n_out * tokens,
    )


def _f32(d: int) -> Weight:
    return Weight("norm.weight", "F32", (d,))


def _tokens(n: int) -> str:
    return f"{n} token{'' if n == 1 else 's'}"


def measure(device: str, *, large_too: bool = True) -> Iterator[Check]:
    """A line for each shape: the large one where it is wanted and done soon."""
    for small, large in zip(shapes(large=False), shapes(large=True), strict=True):
        try:
            found, seconds = _line(device, small)
            work = max(large.nbytes / small.nbytes, large.flops / max(1, small.flops))
            if large_too and seconds and seconds * work < LARGE_S:
                found, _ = _line(device, large)
        except Exception as error:  # whatever a driver raises belongs into the report
            found = Check(small.name, "fail", f"{type(error).__name__}: {error}")
        yield found


def _line(device: str, shape: Shape) -> tuple[Check, float]:
    """The line of a shape, and the seconds of a run."""
    backend = open_backend(device, shape.kv_format)
    try:
        lacks = next(filter(None, (backend.supports(node) for node in shape.graph(device) if node.inputs)), None)
        if lacks:
            return Check(shape.name, "skip", f"not supported: {lacks}"), 0.0
        opened = cases.Opened(shape, backend)
        program = opened.compile()[-1]
        opened.write()
        seconds, clock = _seconds(backend, program, shape)
        kernels = _kernels(backend, opened)
        opened.close()
    finally:
        backend.close()
    rate = f"{shape.nbytes / seconds / 1e9:.3g} GB/s"
    if shape.flops:
        rate += f", {shape.flops / seconds / 1e9:.3g} GFLOP/s"
    values: Values = {
        "seconds": seconds,
        "bytes": shape.nbytes,
        "flops": shape.flops,
        "clock": clock,
    }
    by = f" by {kernels}" if kernels else ""
    return Check(shape.name, "pass", f"{1e3 * seconds:.4g} ms, {rate}{by} ({clock})", values), seconds


def _kernels(backend: Backend, opened: cases.Opened) -> str:
    """The kernels of the op itself, without those that fill the KV rows before it."""
    found = []
    for listed in opened.launches():
        if listed is not None:
            found += [v["kernel"] for v in listed.to_json()["launches"] if v["node"] == opened.out.name]
    return " + ".join(found)


def _seconds(backend: Backend, program: Program, shape: Shape) -> tuple[float, str]:
    """Seconds of one run, the median of some, and by which clock. The device's counts the op's own launches."""
    program.run()  # compiles
    program.run()  # records
    backend.synchronize()
    try:
        own = [sum(t.seconds for t in backend.launch_times(program) if t.node == "blk.0.out") for _ in range(ROUNDS)]
        return statistics.median(own), "device clock"
    except UnsupportedError:
        pass
    start = time.perf_counter()
    program.run()
    backend.synchronize()
    runs = max(1, min(MOST_RUNS, int(ROUND_S / (time.perf_counter() - start))))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(runs):
            program.run()
        backend.synchronize()
        rounds.append((time.perf_counter() - start) / runs)
    return statistics.median(rounds), "host clock"
