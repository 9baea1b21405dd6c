"""Vocabularies for the tests: those packed in tests/data/vocabs (see tests/tools/pack_vocabs.py), and tiny ones."""

from __future__ import annotations

import functools
import json
import lzma
from itertools import accumulate
from pathlib import Path

import numpy as np

from minfer.text.tokenizer import Tokenizer

VOCABS = Path(__file__).parent.parent / "data" / "vocabs"
PREFIX = "tokenizer.ggml."
SMOLLM = "SmolLM2-135M-Instruct.Q4_1"
GEMMA = "gemma-3-270m-q4_k_m"
NAMES = ("deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder")


@functools.cache
def cases() -> dict:
    return json.loads(lzma.decompress((VOCABS / "cases.json.xz").read_bytes()))


def metadata(name: str) -> dict:
    packed = json.loads(lzma.decompress((VOCABS / f"{name}.json.xz").read_bytes()))
    tokens = packed.pop("tokens")
    packed[PREFIX + "token_type"] = np.array(expand(packed.pop("type_runs")), np.int32)
    if "score_runs" in packed:
        packed[PREFIX + "scores"] = np.array(list(accumulate(expand(packed.pop("score_runs")))), np.float32)
    if "merge_steps" in packed:
        made = [tokens[id] for id in accumulate(packed.pop("merge_steps"))]
        cuts = packed.pop("merge_cuts")
        packed[PREFIX + "merges"] = [f"{t[:cut]} {t[cut:]}".encode() for t, cut in zip(made, cuts, strict=True)]
    packed[PREFIX + "tokens"] = [token.encode() for token in tokens]
    return packed


def expand(runs: list) -> list:
    return [value for value, n in runs for _ in range(n)]


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(name))


def byte_alphabet() -> list[str]:
    """GPT-2's characters for bytes 0 to 255, written out the other way round than in the code under test."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def tiny_bpe(merges: list[str], control: list[str] = (), user: list[str] = (), **extra) -> dict:
    """Ids 0 to 255 are the bytes, then one token a merge, then control and user-defined tokens."""
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens) + [3] * len(control) + [4] * len(user)
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": "gpt-2",
        PREFIX + "tokens": tokens + list(control) + list(user),
        PREFIX + "token_type": types,
        PREFIX + "merges": merges,
        **{PREFIX + key: value for key, value in extra.items()},
    }


def tiny_spm(pieces: dict[str, float], user: list[str] = (), **extra) -> dict:
    """Ids: <unk> 0, <s> 1, </s> 2, bytes 3 to 258, then the pieces with their scores, then user-defined tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *user]
    return {
        PREFIX + "model": "llama",
        PREFIX + "tokens": tokens,
        PREFIX + "scores": [0.0] * 259 + list(pieces.values()) + [0.0] * len(user),
        PREFIX + "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(user)],
        **{PREFIX + key: value for key, value in extra.items()},
    }
