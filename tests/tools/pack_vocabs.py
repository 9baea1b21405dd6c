"""Pack the tokenizer of GGUF files for the tests: `python tests/tools/pack_vocabs.py FILE... -o tests/data/vocabs`.

A vocabulary file of several megabytes becomes a few hundred kilobytes: a merge is stored as the token it makes and
where that token is cut. `tests/text/vocab_data.py` reads the result.
"""

from __future__ import annotations

import argparse
import json
import lzma
from itertools import groupby
from pathlib import Path

import numpy as np

from minfer import gguf

SCALARS = (
    "model pre bos_token_id eos_token_id eot_token_id unknown_token_id padding_token_id "
    "add_bos_token add_eos_token add_space_prefix"
)


def deltas(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def pack(path: Path) -> bytes:
    metadata = gguf.open_model(path).metadata
    prefix = "tokenizer.ggml."
    packed: dict[str, object] = {
        prefix + key: metadata[prefix + key] for key in SCALARS.split() if prefix + key in metadata
    }
    for key in ("general.name", "tokenizer.chat_template"):
        if key in metadata:
            packed[key] = metadata[key]
    tokens = [token.decode("utf-8") for token in metadata[prefix + "tokens"]]
    packed["tokens"] = tokens
    types = metadata[prefix + "token_type"].tolist()
    packed["type_runs"] = [[kind, len(list(run))] for kind, run in groupby(types)]
    if prefix + "scores" in metadata:
        scores = np.asarray(metadata[prefix + "scores"], np.float32).astype(float).tolist()
        packed["score_runs"] = [
            [step, len(list(run))] for step, run in groupby(b - a for a, b in zip([0.0, *scores], scores, strict=False))
        ]
    if prefix + "merges" in metadata:
        ids = {token: i for i, token in enumerate(tokens)}
        pairs = [merge.decode("utf-8").split(" ") for merge in metadata[prefix + "merges"]]
        packed["merge_steps"] = deltas([ids[left + right] for left, right in pairs])
        packed["merge_cuts"] = [len(left) for left, _ in pairs]
    text = json.dumps(packed, ensure_ascii=False, separators=(",", ":"))
    return lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for path in args.files:
        data = pack(path)
        (args.output / (path.stem.removeprefix("ggml-vocab-") + ".json.xz")).write_bytes(data)
        print(f"{path.name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
