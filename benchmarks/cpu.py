"""CPU speed against llama-cpp-python: same file, same threads, alternating rounds; medians and ratios as markdown.

    python benchmarks/cpu.py MODEL.gguf --peer PYTHON_WITH_LLAMA_CPP [--threads 2] [--works decode0,prefill512,...]

Each engine works in a process of its own and waits while the other is timed. llama.cpp is timed with flash attention
off and on, and the better one counts. Works: decodeD (one sequence at depth D), prefillN, batchS (S sequences
decoding together, 128 rows each), start (process start to first token of a 20-token prompt, warm page cache) and its
peak memory. GB/s counts weight and KV bytes read a step; Gop/s two for each weight and token, attention aside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

STEPS = 16  # decode steps a round
PAST = 128  # rows each sequence of a batch has


# --- the two engines, each in a worker process -------------------------------------------------------------------


class Minfer:
    def __init__(self, path: str, threads: int, n_ctx: int, n_seq: int, kv: str) -> None:
        from minfer.engine.engine import Engine
        from minfer.engine.place import place
        from minfer.gguf import open_model
        from minfer.models import load_architecture

        file = open_model(path)
        arch = load_architecture(file)
        self.engine = Engine(file, arch, place(arch, "cpu", kv), n_ctx=n_ctx, kv_format=kv, threads=threads)
        plan = self.engine.plan()
        embed = plan.graph.nodes[next(n.index for n in plan.graph if n.kind == "Embed")].weights
        self.weight_bytes = plan.weight_bytes
        self.n_weights = sum(w.shape[0] * w.shape[1] for n in plan.graph for w in n.weights if len(w.shape) == 2)
        self.n_weights -= sum(w.shape[0] * w.shape[1] for w in embed)

    def fill(self, depth: int) -> None:
        self.engine.cells.tokens = [1] * depth  # the rows' contents do not matter to the time

    def step(self, token: int) -> int:
        return int(self.engine.prefill_best([token], 1).ids[0])

    def prefill(self, tokens: list[int]) -> int:
        return int(self.engine.prefill_best(tokens, 1).ids[0])

    def batch(self, n_seq: int, step: int) -> None:
        import numpy as np

        from minfer.kv.store import Rows

        base = np.arange(n_seq, dtype=np.int32) * (PAST + STEPS)
        position = np.full(n_seq, PAST + step, np.int32)
        window = np.stack([base, base + position + 1], axis=1).astype(np.int32).reshape(-1)
        rows = Rows(position, base + position, window, 2)
        self.engine.forward_best(list(range(100, 100 + n_seq)), rows, n_seq, 1)


class LlamaCpp:
    def __init__(self, path: str, threads: int, n_ctx: int, n_seq: int, flash: bool) -> None:
        import llama_cpp as c

        self.c = c
        c.llama_log_set(_quiet(c), None)
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 512, 512, n_seq
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        params.kv_unified = True
        self.ctx = c.llama_init_from_model(self.model, params)
        self.memory = c.llama_get_memory(self.ctx)
        self.n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.past = self.batched = self.filled = 0
        self.one = c.llama_batch_init(512, 0, n_seq)

    def fill(self, depth: int) -> None:
        if self.batched or self.filled < depth:
            self.c.llama_memory_seq_rm(self.memory, -1, -1, -1)
            self.past = self.batched = self.filled = 0
        else:  # the rows are there from a round before
            self.c.llama_memory_seq_rm(self.memory, 0, depth, -1)
            self.past = depth
            return
        while self.past < depth:
            self._decode([(1, self.past + i, 0) for i in range(min(512, depth - self.past))])
        self.filled = depth

    def _decode(self, tokens: list[tuple[int, int, int]], every: bool = False) -> None:
        batch = self.one
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = every or i == len(tokens) - 1
        if self.c.llama_decode(self.ctx, batch):
            raise RuntimeError("llama_decode failed")
        self.past += len(tokens)

    def step(self, token: int) -> int:
        self._decode([(token, self.past, 0)])
        return self._argmax(-1)

    def _argmax(self, row: int) -> int:
        import numpy as np

        logits = self.c.llama_get_logits_ith(self.ctx, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).argmax())

    def prefill(self, tokens: list[int]) -> int:
        self._decode([(token, i, 0) for i, token in enumerate(tokens)])
        return self._argmax(-1)

    def batch(self, n_seq: int, step: int) -> None:
        if step == 0 and self.batched != n_seq:  # filled once; later rounds go back to its end
            self.fill(0)
            for seq in range(n_seq):
                self._decode([(1, i, seq) for i in range(PAST)])
            self.batched = n_seq
        elif step == 0:
            for seq in range(n_seq):
                self.c.llama_memory_seq_rm(self.memory, seq, PAST, -1)
        self._decode([(100 + s, PAST + step, s) for s in range(n_seq)], every=True)
        for s in range(n_seq):
            self._argmax(s)


def _quiet(c: Any) -> Any:
    global _callback  # llama.cpp keeps the pointer
    _callback = c.llama_log_callback(lambda *_: None)
    return _callback


def worker(name: str, path: str, threads: int, n_ctx: int, n_seq: int, kv: str) -> None:
    """Answers a line of JSON (a work) with a line of JSON (seconds a step)."""
    if name == "minfer":
        engine: Any = Minfer(path, threads, n_ctx, n_seq, kv)
        facts = {"weight_bytes": engine.weight_bytes, "n_weights": engine.n_weights}
    else:
        engine, facts = LlamaCpp(path, threads, n_ctx, n_seq, name == "llama.cpp-flash"), {}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        kind, size = json.loads(line)
        print(json.dumps(time_work(engine, kind, size)), flush=True)


def time_work(engine: Any, kind: str, size: int) -> list[float]:
    seconds = []

    def timed(f: Any, *args: Any) -> None:
        start = time.perf_counter()
        f(*args)
        seconds.append(time.perf_counter() - start)

    if kind == "decode":
        engine.fill(size)
        engine.step(5)
        for i in range(STEPS):
            timed(engine.step, 100 + i)
    elif kind == "prefill":
        engine.fill(0)
        timed(engine.prefill, [1000 + i for i in range(size)])
    elif kind == "batch":
        for step in range(STEPS):
            timed(engine.batch, size, step)
        seconds = seconds[1:]
    return seconds


FIRST_TOKEN = {
    "minfer": """
import sys, minfer
with minfer.load(sys.argv[1], n_ctx=512, device="cpu", threads=int(sys.argv[2])) as model:
    next(model.generate(list(range(1000, 1020)), n_predict=1, sampling=minfer.Sampling.greedy()))
""",
    "llama.cpp": """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), verbose=False)
llm.create_completion(list(range(1000, 1020)), max_tokens=1, temperature=0.0)
""",
}


def first_token(python: str, name: str, path: str, threads: int) -> tuple[float, float]:
    """(seconds from process start to exit after one token, peak memory in MB)."""
    # Both as an installer leaves them, their Python compiled: the first start writes what is missing.
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    command = [python, "-c", FIRST_TOKEN[name], path, str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=compiled)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name} failed to start")
    return time.perf_counter() - start, usage.ru_maxrss / 1000


# --- the rounds --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="a Python that has llama-cpp-python; without it, minfer alone is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv", default="f16", help="minfer's KV format; llama.cpp keeps its default, f16")
    parser.add_argument("--works", default="decode0,decode2048,prefill512,prefill32,batch32,start")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    works = [(w.rstrip("0123456789"), int(w.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)) for w in args.works.split(",")]
    n_seq = max([size for kind, size in works if kind == "batch"], default=1)
    deepest = max([size for kind, size in works if kind in ("decode", "prefill")], default=0)
    n_ctx = max(n_seq * (PAST + STEPS), deepest + STEPS + 1, 512)
    if args.worker:
        worker(args.worker, args.model, args.threads, n_ctx, n_seq, args.kv)
        return
    pythons = {"minfer": sys.executable}
    if args.peer:
        pythons |= {"llama.cpp": args.peer, "llama.cpp-flash": args.peer}
    results: dict[tuple[str, int], dict[str, list[float]]] = {w: {n: [] for n in pythons} for w in works}
    peaks: dict[str, list[float]] = {n: [] for n in pythons}
    workers, facts = {}, {}
    for name, python in pythons.items():
        command = [python, __file__, args.model, "--worker", name, "--threads", str(args.threads)]
        command += ["--works", args.works, "--kv", args.kv]
        workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        facts[name] = json.loads(workers[name].stdout.readline() or "{}")
    for _ in range(args.rounds):
        for work in works:
            for name, process in workers.items():
                if work[0] == "start":
                    if name in FIRST_TOKEN:
                        seconds, peak = first_token(pythons[name], name, args.model, args.threads)
                        results[work][name].append(seconds)
                        peaks[name].append(peak)
                    continue
                process.stdin.write(json.dumps(work) + "\n")
                process.stdin.flush()
                results[work][name] += json.loads(process.stdout.readline())
    for process in workers.values():
        process.stdin.close()
        process.wait()
    print_table(results, peaks, facts["minfer"])


def print_table(
    results: dict[Any, dict[str, list[float]]], peaks: dict[str, list[float]], facts: dict[str, int]
) -> None:
    print("| work | minfer | llama.cpp | ratio (median) | ratio (best) | GB/s | Gop/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (kind, size), by_name in results.items():
        tokens = {"decode": 1, "prefill": size, "batch": size, "start": 1}[kind]
        mine = by_name["minfer"]
        peers = [times for name, times in by_name.items() if name != "minfer" and times]
        peer = min(peers, key=statistics.median) if peers else None

        def show(times: list[float] | None, kind: str = kind, tokens: int = tokens) -> str:
            if not times:
                return "-"
            middle = statistics.median(times)
            return f"{middle * 1e3:.0f} ms" if kind == "start" else f"{tokens / middle:.0f} tok/s"

        ratios = [f"{f(peer) / f(mine):.2f}x" if peer else "-" for f in (statistics.median, min)]
        rates = ["-", "-"]
        if kind != "start":
            rates[0] = f"{facts['weight_bytes'] / statistics.median(mine) / 1e9:.1f}"
            rates[1] = f"{2 * facts['n_weights'] * tokens / statistics.median(mine) / 1e9:.0f}"
        print(f"| {kind} {size or ''} | {show(mine)} | {show(peer)} | {' | '.join(ratios)} | {' | '.join(rates)} |")
    if peaks["minfer"]:
        memory = {name: statistics.median(values) for name, values in peaks.items() if values}
        ratio = f"{memory['minfer'] / memory['llama.cpp']:.2f}x" if "llama.cpp" in memory else "-"
        theirs = f"{memory['llama.cpp']:.0f} MB" if "llama.cpp" in memory else "-"
        print(f"| peak memory | {memory['minfer']:.0f} MB | {theirs} | {ratio} (lower is better) | | | |")


if __name__ == "__main__":
    main()
