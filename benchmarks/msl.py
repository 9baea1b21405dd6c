"""What the software Metal device costs: a matvec, simdgroup collectives, launches, and the checked mode's factor.

    python benchmarks/msl.py [--compiler g++|clang|zig] [--rounds 9]

Prints medians and minima over interleaved rounds; CPU time stands beside wall time because machines are shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minfer.msl import Library
from minfer.msl.compiler import select
from minfer.msl.device import Device
from minfer.msl.recording import Bound, Launch, Recording

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN = Path(__file__).parent.parent / "tests" / "msl" / "metal" / "known.metal"
ITERATIONS = 10000  # of a kernel, so that starting it does not count
COLLECTIVES = """
#include <metal_stdlib>
using namespace metal;
kernel void sums(device float * y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    float s = i;
    for (int k = 0; k < ITERATIONS; k++) s = simd_sum(s) * 0.03125f;
    y[i] = s;
}
kernel void shuffles(device float * y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    float s = i;
    for (int k = 0; k < ITERATIONS; k++) s = simd_shuffle_xor(s, 1) + 1;
    y[i] = s;
}
kernel void barriers(device float * y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    for (int k = 0; k < ITERATIONS; k++) simdgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = i;
}
kernel void products(device float * y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    simdgroup_float8x8 a(1.0f), b(1.0f), c(0.0f);
    for (int k = 0; k < ITERATIONS; k++) simdgroup_multiply_accumulate(c, a, b, c);
    y[i] = c.thread_elements()[0];
}
kernel void one(device float * y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] += 1; }
"""


def main() -> None:
    """Run every measurement and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=None)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(select(args.compiler).version)
    rng = np.random.default_rng(0)
    lib, small = (
        Library.from_file(KNOWN, compiler=args.compiler),
        Library(COLLECTIVES, compiler=args.compiler, defines={"ITERATIONS": str(ITERATIONS)}),
    )

    matvec = lib.kernel("matvec_q4_1")

    def problem(rows: int) -> tuple[np.ndarray, ...]:
        blocks = np.zeros((rows, 18), np.dtype([("d", "f2"), ("m", "f2"), ("qs", "u1", 16)]))
        blocks["d"], blocks["m"] = rng.uniform(0.01, 0.1, blocks.shape), rng.uniform(-0.5, 0.5, blocks.shape)
        blocks["qs"] = rng.integers(0, 256, (*blocks.shape, 16))
        x = rng.standard_normal(576).astype(np.float32)
        return blocks, x, np.zeros(rows, np.float32), np.uint32(rows), np.uint32(576)

    big, part = problem(49152), problem(4096)
    y = np.zeros(32, np.float32)
    device = Device(compiler=args.compiler)
    own = device.library(COLLECTIVES.replace("ITERATIONS", str(ITERATIONS)))
    target = device.buffer(4096)
    launch = Launch(own.kernel("one"), (64, 1, 1), (64, 1, 1), {0: Bound(target)})
    step = Recording([launch] * 215)

    def matmul(threads: int) -> None:
        matvec(49152 // 8, 64, *big, os_threads=threads)

    cases: dict[str, tuple[Callable[[], object], float, str]] = {
        "matvec Q4_1 49,152 x 576, 2 OS threads": (lambda: matmul(2), 1e3, "ms"),
        "matvec Q4_1 49,152 x 576, 1 OS thread": (lambda: matmul(1), 1e3, "ms"),
        "simd_sum": (lambda: small.kernel("sums")(1, 32, y, os_threads=1), 1e6 / ITERATIONS, "us"),
        "simd_shuffle_xor": (lambda: small.kernel("shuffles")(1, 32, y, os_threads=1), 1e6 / ITERATIONS, "us"),
        "simdgroup_barrier": (lambda: small.kernel("barriers")(1, 32, y, os_threads=1), 1e6 / ITERATIONS, "us"),
        "simdgroup 8x8x8 multiply": (lambda: small.kernel("products")(1, 32, y, os_threads=1), 1e6 / ITERATIONS, "us"),
        "recorded launch of 64 threads": (step.run, 1e6 / 215, "us"),
        "matvec of 4,096 rows, fast": (lambda: matvec(512, 64, *part, os_threads=1), 1e3, "ms"),
        "matvec of 4,096 rows, checked": (lambda: matvec(512, 64, *part, check=True), 1e3, "ms"),
        "matvec of 4,096 rows, counted": (lambda: matvec(512, 64, *part, check=True, count=True), 1e3, "ms"),
        "matvec of 4,096 rows, lockstep": (lambda: matvec(512, 64, *part, order="lockstep"), 1e3, "ms"),
    }
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for run, _, _ in cases.values():
        run()  # compile
    for _ in range(args.rounds):
        for name, (run, _, _) in cases.items():
            t, c = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - t)
            cpu[name].append(time.process_time() - c)
    print(f"{'':42}{'median':>10}{'min':>10}{'cpu min':>10}")
    for name, (_, scale, unit) in cases.items():
        w, c = wall[name], cpu[name]
        print(f"{name:42}{statistics.median(w) * scale:10.3f}{min(w) * scale:10.3f}{min(c) * scale:10.3f} {unit}")
    fast = min(cpu["matvec of 4,096 rows, fast"])
    for mode in ("checked", "counted", "lockstep"):
        print(f"{mode} / fast (CPU): {min(cpu[f'matvec of 4,096 rows, {mode}']) / fast:.1f}")


if __name__ == "__main__":
    main()
