"""CUDA speed on random weights of real shapes: decode and prefill, tokens/s, against figures of llama.cpp on an H200.

    python benchmarks/gpu.py [--models 0.5B,0.6B,7B] [--works decode128,decode8192,prefill512,prefill4096] [--launches]

A model is written as GGUF to a temporary folder (7B: 4.4 GB), loaded on the GPU and timed: medians of rounds. GB/s
counts the weight and KV bytes that a step must read, TFLOP/s two operations for each weight and token and those of
attention.
`--launches` gives the microseconds of each launch of a layer, each repeated in a graph of its own.
The peer's figures were taken on an H200 with flash attention, built from llama-cpp-python's sources.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices.cuda import CudaDevice
from minfer.engine.engine import Engine
from minfer.engine.place import N_BATCH, place
from minfer.gguf import Tensor, open_model, write_model
from minfer.models import load_architecture
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.backends.gpu.devices.base import Step

ROUNDS, STEPS = 5, 64
HBM = 4.3e12  # bytes/s of a device-to-device copy on this card, reads and writes counted
TENSOR = 989e12  # FLOP/s of its tensor cores on halves, by the data sheet, without sparsity


@dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    d: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    types: dict[str, str]  # by the last part of a tensor's name; "" is all others

    def type_of(self, name: str) -> str:
        return self.types.get(name, self.types[""])


MODELS = {
    "0.5B": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True, {"": "Q4_0", "token_embd": "Q8_0"}),
    "0.6B": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, {"": "Q8_0"}),
    "7B": Shape(
        "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False,
        {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"},
    ),
}  # fmt: skip
NAMES = {"0.5B": "Qwen2.5-0.5B Q4_0", "0.6B": "Qwen3-0.6B Q8_0", "7B": "Qwen2.5-7B Q4_K_M"}
#: Tokens/s of llama.cpp on an H200, and the ratio asked for.
PEER = {
    ("0.5B", "decode128"): (980, 1.3),
    ("0.5B", "decode8192"): (763, 1.2),
    ("0.5B", "prefill512"): (47400, 0.5),
    ("0.5B", "prefill4096"): (61300, 0.5),
    ("0.6B", "decode128"): (747, 1.3),
    ("0.6B", "prefill512"): (42700, 0.5),
    ("7B", "decode128"): (262, 1.3),
    ("7B", "decode8192"): (236, 1.2),
    ("7B", "prefill512"): (8590, 0.7),
    ("7B", "prefill4096"): (9950, 0.7),
}


def random_blocks(rng: np.random.Generator, name: str, n: int) -> np.ndarray:
    """`n` blocks of a format with random codes and scales that keep activations finite."""
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (n, fmt.block_bytes), np.uint8)
    scale = np.frombuffer(
        np.float16({"Q4_0": 0.004, "Q8_0": 0.0004, "Q4_K": 0.0001, "Q6_K": 0.00002}[name]).tobytes(), np.uint8
    )
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
        raw[:, at : at + 2] = scale
    return raw


def write(shape: Shape, path: Path) -> None:
    rng = np.random.default_rng(0)
    pool: dict[str, np.ndarray] = {}

    def matrix(name: str, n_in: int, n_out: int) -> Tensor:
        kind = shape.type_of(name.removesuffix(".weight").rsplit(".", 1)[-1])
        fmt = FORMATS[kind]
        count = n_in * n_out // fmt.block_size

        def data() -> np.ndarray:
            if kind not in pool:
                pool[kind] = random_blocks(rng, kind, (32 << 20) // fmt.block_bytes)
            return np.resize(pool[kind], (count, fmt.block_bytes)).reshape(-1)

        return Tensor(name, fmt, (n_in, n_out), data)

    def vector(name: str, n: int, low: float, high: float) -> Tensor:
        return Tensor.of(name, rng.uniform(low, high, n).astype(np.float32))

    q, kv, a = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.arch
    tensors = [matrix("token_embd.weight", shape.d, shape.vocab), vector("output_norm.weight", shape.d, 0.9, 1.1)]
    if not shape.tied:
        tensors.append(matrix("output.weight", shape.d, shape.vocab))
    for i in range(shape.layers):
        b = f"blk.{i}."
        tensors += [vector(b + n + ".weight", shape.d, 0.9, 1.1) for n in ("attn_norm", "ffn_norm")]
        tensors += [matrix(b + "attn_q.weight", shape.d, q), matrix(b + "attn_k.weight", shape.d, kv)]
        tensors += [matrix(b + "attn_v.weight", shape.d, kv), matrix(b + "attn_output.weight", q, shape.d)]
        tensors += [matrix(b + f"ffn_{n}.weight", shape.d, shape.ff) for n in ("gate", "up")]
        tensors.append(matrix(b + "ffn_down.weight", shape.ff, shape.d))
        if a == "qwen2":
            tensors += [vector(b + f"attn_{n}.bias", w, -0.1, 0.1) for n, w in (("q", q), ("k", kv), ("v", kv))]
        else:
            tensors += [vector(b + f"attn_{n}_norm.weight", shape.head_dim, 0.9, 1.1) for n in "qk"]
    metadata = {
        "general.architecture": a,
        f"{a}.block_count": np.uint32(shape.layers),
        f"{a}.context_length": np.uint32(32768),
        f"{a}.embedding_length": np.uint32(shape.d),
        f"{a}.feed_forward_length": np.uint32(shape.ff),
        f"{a}.attention.head_count": np.uint32(shape.heads),
        f"{a}.attention.head_count_kv": np.uint32(shape.kv_heads),
        f"{a}.attention.key_length": np.uint32(shape.head_dim),
        f"{a}.attention.value_length": np.uint32(shape.head_dim),
        f"{a}.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        f"{a}.rope.freq_base": np.float32(1e6),
    }
    write_model(path, metadata, tensors)


class Bench:
    """A model of a shape on the GPU."""

    def __init__(self, shape: Shape, path: Path, n_ctx: int) -> None:
        self.shape = shape
        file = open_model(path)
        arch = load_architecture(file)
        wide = shape.layers * shape.kv_heads * shape.head_dim >= 8192
        self.kv = "f16" if wide else "f32"
        self.engine = Engine(file, arch, place(arch, "cuda", self.kv), n_ctx=n_ctx, kv_format=self.kv)
        backend = self.engine.backends["cuda"]
        assert isinstance(backend, GpuBackend)
        assert isinstance(backend.device, CudaDevice)
        self.backend, self.device = backend, backend.device
        plan = self.engine.plan()
        self.weight_bytes = plan.weight_bytes
        self.n_weights = sum(w.shape[0] * w.shape[1] for n in plan.graph for w in n.weights if len(w.shape) == 2)
        self.n_weights -= shape.d * shape.vocab  # the embedding is looked up; tied, it is there a second time

    def decode(self, depth: int) -> tuple[float, float, float]:
        """(tokens/s, bytes/s, FLOP/s), greedy, from `depth` on, as a generation runs it."""
        times = []
        for _ in range(ROUNDS):
            self.engine.cells.tokens = [1] * depth
            passes = self.engine.greedy([1], n=STEPS + 3)
            for _ in range(3):
                next(passes)()
            start = time.perf_counter()
            for step in passes:
                step()
            times.append((time.perf_counter() - start) / STEPS)
        t, s = statistics.median(times), self.shape
        rows = 2 * s.layers * s.kv_heads * s.head_dim * (depth + STEPS / 2)
        attention = 4 * s.layers * s.heads * s.head_dim * (depth + STEPS / 2)
        return (
            1 / t,
            (self.weight_bytes + rows * (2 if self.kv == "f16" else 4)) / t,
            (2 * self.n_weights + attention) / t,
        )

    def prefill(self, n: int) -> tuple[float, float, float]:
        tokens = np.random.default_rng(1).integers(0, self.shape.vocab, n).tolist()
        times = []
        for _ in range(ROUNDS + 1):
            self.engine.cells.tokens = []
            start = time.perf_counter()
            self.engine.prefill_best(tokens, 1)
            times.append(time.perf_counter() - start)
        t, s = statistics.median(times[1:]), self.shape
        body = self.n_weights - s.d * s.vocab
        flops = 2 * body * n + 2 * s.layers * s.heads * s.head_dim * n * n
        return n / t, self.weight_bytes * -(-n // N_BATCH) / t, flops / t

    def launches(self, n_tokens: int, depth: int) -> list[tuple[str, str, float]]:
        """(node, kernel, microseconds) of the launches of a step after `depth` tokens, each in a graph of its own."""
        self.engine.cells.tokens = [1] * depth
        tokens = [1] * n_tokens
        rows = self.engine.cells.rows(n_tokens)
        for _ in range(2):
            self.engine.forward_best(tokens, rows, 1, 1)
        steps = self.engine.cache.get(self.engine.params(n_tokens, 1, top_k=1)).programs[0].steps

        def seconds(count: int, some: Sequence[Step]) -> float:
            recording = self.device.record(list(some) * count)
            rounds = []
            for _ in range(5):
                self.device.synchronize()
                start = time.perf_counter()
                recording.run()
                self.device.synchronize()
                rounds.append(time.perf_counter() - start)
            return min(rounds)

        out = [("the whole step", "", (seconds(3, steps) - seconds(1, steps)) / 2 * 1e6)]
        for step in steps:
            if not step.launch.node.startswith("blk.") or step.launch.node.startswith("blk.1."):
                out.append(
                    (step.launch.node, step.launch.kernel, (seconds(40, [step]) - seconds(8, [step])) / 32 * 1e6)
                )
        return out


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver_version() -> str:
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\d+\.\d+(\.\d+)?", said)
    return found[0] if found else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="0.5B,0.6B,7B")
    parser.add_argument("--works", default="decode128,decode8192,prefill512,prefill4096")
    parser.add_argument("--launches", action="store_true")
    args = parser.parse_args()
    works: list[str] = args.works.split(",")
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for name in args.models.split(","):
            shape, path = MODELS[name], Path(folder, f"{name}.gguf")
            write(shape, path)
            for work in works:
                kind = work.rstrip("0123456789")
                size = int(work.removeprefix(kind))
                bench = Bench(shape, path, size + STEPS + 16)
                rate, moved, flops = (bench.decode if kind == "decode" else bench.prefill)(size)
                peer, bar = PEER.get((name, work), (0, 0))
                ratio = f"{rate / peer:.2f}x ({bar}x)" if peer else ""
                limits = f"{moved / 1e9:,.0f} ({moved / HBM:.0%})", f"{flops / 1e12:,.1f} ({flops / TENSOR:.0%})"
                rows.append((NAMES[name], work, f"{rate:,.0f}", f"{peer:,}" if peer else "", ratio, *limits))
                print("  ".join(rows[-1]), file=sys.stderr)
                if args.launches:
                    shape_of = (1, size) if kind == "decode" else (min(size, N_BATCH), 0)
                    for node, kernel, us in bench.launches(*shape_of):
                        print(f"{us:9.2f} us  {kernel:20} {node}", file=sys.stderr)
                device = bench.device
                bench.engine.close()
            path.unlink()
    today = datetime.datetime.now(datetime.UTC).date()
    cuda = ".".join(map(str, device.driver_version))
    print(f"{device.gpu}, driver {driver_version()} (CUDA {cuda}), {today}, commit {commit()}\n")
    print("| model | work | tokens/s | llama.cpp | ratio (bar) | GB/s (of a copy) | TFLOP/s (of f16) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
