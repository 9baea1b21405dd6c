"""The two real models against recorded values: an independent float64 pass, and llama.cpp's greedy text."""

from __future__ import annotations

import hashlib
import json
import lzma
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers import DATA, open_engine
from minfer.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from minfer.engine.engine import Engine

MODELS = ("smollm2-135m-q4_1", "gemma-3-270m-q4_k_m")
PROMPTS = ("english", "code", "unicode", "chat", "short", "long")
#: Of the logits, whose spread is about 4; recorded in steps of 1/512.
TOLERANCE = 1e-2
#: llama.cpp quantizes activations to 8 bits: below this margin its own choice is not certain.
MARGIN = 1.0


class Recorded:
    def __init__(self, name: str) -> None:
        self.index = json.loads((DATA / "reference" / f"{name}.json").read_text())
        raw = lzma.decompress((DATA / "reference" / f"{name}.logits.xz").read_bytes())
        halves = np.frombuffer(raw, np.uint8).reshape(2, -1)
        coded = np.ascontiguousarray(halves.T).view(np.int16).reshape(len(self.index["prompts"]), -1)
        self.prompts = {p["name"]: p for p in self.index["prompts"]}
        self.logits = {p["name"]: row / np.float32(512) for p, row in zip(self.index["prompts"], coded, strict=True)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Recorded, Engine, Tokenizer]]:
    path: Path = request.getfixturevalue("smollm_path" if request.param == MODELS[0] else "gemma_path")
    recorded = Recorded(request.param)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == recorded.index["sha256"]
    engine = open_engine(path, n_ctx=1024)
    assert set(recorded.prompts) == set(PROMPTS)
    yield recorded, engine, Tokenizer.from_metadata(engine.file.metadata, engine.arch.n_vocab)
    engine.close()


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_choices(model: tuple[Recorded, Engine, Tokenizer], name: str) -> None:
    recorded, engine, tokenizer = model
    prompt = recorded.prompts[name]
    ids, greedy, margins = prompt["prompt_ids"], prompt["greedy_ids"], np.array(prompt["greedy_margin"])
    assert tokenizer.encode(prompt["text"]) == ids

    engine.cells.truncate(0)
    logits = engine.prefill(ids)
    assert np.abs(logits - recorded.logits[name]).max() < TOLERANCE

    # Teacher-forced: each recorded token is fed whatever we would have chosen.
    rows: list[np.ndarray[Any, Any]] = [logits]
    rows += list(engine.forward(greedy[:-1], engine.cells.rows(len(greedy) - 1), n_outputs=len(greedy) - 1))
    chosen = np.array([row.argmax() for row in rows])
    sure = margins > MARGIN
    assert sure.sum() >= 10
    assert chosen[sure].tolist() == np.array(greedy)[sure].tolist()


def test_the_same_prompt_twice_and_after_another_gives_the_same_bits(model: tuple[Recorded, Engine, Tokenizer]) -> None:
    recorded, engine, _ = model
    results = []
    for name in ("short", "chat", "english", "chat", "chat"):
        engine.cells.truncate(0)
        results.append(engine.prefill(recorded.prompts[name]["prompt_ids"]))
    assert np.array_equal(results[1], results[3])
    assert np.array_equal(results[1], results[4])
