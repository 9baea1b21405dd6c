"""Time to open a GGUF file: `minfer.gguf.open_model` against `gguf.GGUFReader`, in interleaved rounds.

    python benchmarks/gguf_open.py [--rounds N] [--peer-rounds N] [FILE ...]

Without files, two vocabularies are made: 49,152 tokens with merges (the size of SmolLM2) and 262,144 pieces with scores
and types (the size of Gemma 3). A round opens each file once with each reader; medians and their ratio are printed.
The peer is slow (seconds a file), so it takes part in the first `--peer-rounds` rounds only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import gguf
from minfer.gguf import StringArray, Tensor, open_model, write_model

if TYPE_CHECKING:
    from collections.abc import Callable


def made_files(folder: Path) -> list[Path]:
    """Vocabularies of random letters, lengths as in real ones, and one small tensor."""
    rng = np.random.default_rng(0)

    def strings(n: int) -> StringArray:
        letters = rng.integers(97, 123, 16 * n, np.uint8).tobytes()
        return StringArray.of([letters[16 * i : 16 * i + k] for i, k in enumerate(rng.integers(1, 13, n).tolist())])

    tensors = [Tensor.of("output_norm.weight", np.ones(64, np.float32))]
    bpe = {"tokenizer.ggml.tokens": strings(49_152), "tokenizer.ggml.merges": strings(48_900)}
    spm = {"tokenizer.ggml.tokens": strings(262_144), "tokenizer.ggml.scores": np.zeros(262_144, np.float32)}
    for metadata in (bpe, spm):
        n = len(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.token_type"] = np.ones(n, np.int32)
    write_model(folder / "bpe-49152.gguf", bpe, tensors)
    write_model(folder / "spm-262144.gguf", spm, tensors)
    return [folder / "bpe-49152.gguf", folder / "spm-262144.gguf"]


def seconds(action: Callable[[Path], object], path: Path) -> float:
    """Wall time of one call; what it returns is kept until the clock has stopped."""
    start = time.perf_counter()
    kept = action(path)
    elapsed = time.perf_counter() - start
    del kept
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or made_files(Path(folder))
        ours: dict[Path, list[float]] = {path: [] for path in files}
        theirs: dict[Path, list[float]] = {path: [] for path in files}
        for i in range(args.rounds):
            for path in files:
                ours[path].append(seconds(open_model, path))
                if i < args.peer_rounds:
                    theirs[path].append(seconds(gguf.GGUFReader, path))
        print(f"{'file':40} {'tokens':>8} {'minfer':>10} {'gguf':>10} {'ratio':>8}")
        for path in files:
            with open_model(path) as model:
                tokens = model.metadata.get("tokenizer.ggml.tokens")
                n_tokens = len(tokens) if isinstance(tokens, StringArray) else 0
            mine = statistics.median(ours[path])
            row = f"{path.name:40} {n_tokens:>8} {mine * 1e3:>7.1f} ms"
            if theirs[path]:
                peer = statistics.median(theirs[path])
                row += f" {peer * 1e3:>7.0f} ms {peer / mine:>7.0f}x"
            print(row)


if __name__ == "__main__":
    main()
