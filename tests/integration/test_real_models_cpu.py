"""The two real models on the CPU backend: no further from exact arithmetic than llama.cpp's 8-bit products are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from test_real_models import MARGIN, MODELS, PROMPTS, Recorded

from helpers import open_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from minfer.engine.engine import Engine

#: Root mean square of llama.cpp 0.3.36's logits after each prompt (PROMPTS in order) less those of the float64 pass.
LLAMA_CPP = {
    "smollm2-135m-q4_1": (0.250, 0.237, 0.128, 0.243, 0.107, 0.079),
    "gemma-3-270m-q4_k_m": (0.200, 0.237, 0.381, 0.241, 0.344, 0.154),
}
#: Both round activations to 8 bits, and one logit vector a prompt is a draw: a prompt's error moves by half with the KV
#: format. Over 288 positions ours was 0.99 of theirs for SmolLM2, 0.55 for Gemma.
DRAW = 1.5


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Recorded, Engine]]:
    path: Path = request.getfixturevalue("smollm_path" if request.param == MODELS[0] else "gemma_path")
    engine = open_engine(path, n_ctx=1024, device="cpu")
    yield Recorded(request.param), engine
    engine.close()


def test_logits_are_no_further_off_than_llama_cpp(model: tuple[Recorded, Engine]) -> None:
    recorded, engine = model
    errors = []
    for name in PROMPTS:
        engine.cells.truncate(0)
        logits = engine.prefill(recorded.prompts[name]["prompt_ids"])
        errors.append(float(np.sqrt(np.mean((logits - recorded.logits[name]) ** 2))))
    theirs = LLAMA_CPP[next(m for m in MODELS if Recorded(m).index["sha256"] == recorded.index["sha256"])]
    assert np.mean(errors) <= DRAW * np.mean(theirs), errors


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_choices(model: tuple[Recorded, Engine], name: str) -> None:
    """Teacher-forced: wherever llama.cpp's choice has a margin, ours is the same; one token at a time, too."""
    recorded, engine = model
    prompt = recorded.prompts[name]
    greedy, margins = prompt["greedy_ids"], np.array(prompt["greedy_margin"])
    engine.cells.truncate(0)
    first = engine.prefill(prompt["prompt_ids"])
    together = engine.forward(greedy[:-1], engine.cells.rows(len(greedy) - 1), n_outputs=len(greedy) - 1)
    ways = [[first, *together]]
    if name == "english":
        ways.append([first, *(engine.prefill([token]) for token in greedy[:-1])])
    sure = margins > MARGIN
    assert sure.sum() >= 10
    for rows in ways:
        assert np.array([row.argmax() for row in rows])[sure].tolist() == np.array(greedy)[sure].tolist()
