"""The two real models on the CPU backend: no further from f32 arithmetic than llama.cpp's 8-bit products are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from test_real_models import MARGIN, MODELS, PROMPTS, Recorded

from helpers import open_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from minfer.engine.engine import Engine

#: Prompts that the oracle runs quickly, and llama.cpp 0.3.36's mean distance from f32 arithmetic over
#: the 48 positions after each: root mean square of its logits less the oracle's, teacher-forced with the recorded text.
SHORT = ("english", "code", "unicode", "chat", "short")
LLAMA_CPP = {
    "smollm2-135m-q4_1": (0.2870, 0.2271, 0.1534, 0.2475, 0.2064),
    "gemma-3-270m-q4_k_m": (0.2486, 0.3423, 0.2419, 0.2308, 0.3375),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Recorded, Engine]]:
    path: Path = request.getfixturevalue("smollm_path" if request.param == MODELS[0] else "gemma_path")
    engine = open_engine(path, n_ctx=1024, device="cpu")
    yield Recorded(request.param), engine
    engine.close()


def test_logits_are_no_further_off_than_llama_cpp(model: tuple[Recorded, Engine]) -> None:
    """In the mean over 240 positions: both round activations to 8 bits, so that one position is a draw."""
    recorded, engine = model
    oracle = open_engine(engine.file.path, n_ctx=1024)
    errors = []
    for name in SHORT:
        prompt = recorded.prompts[name]
        ours, exact = (_teacher_forced(e, prompt["prompt_ids"], prompt["greedy_ids"]) for e in (engine, oracle))
        errors += np.sqrt(np.mean((ours - exact) ** 2, axis=1)).tolist()
    oracle.close()
    theirs = LLAMA_CPP[next(m for m in MODELS if Recorded(m).index["sha256"] == recorded.index["sha256"])]
    assert np.mean(errors) <= np.mean(theirs), np.mean(errors)


def _teacher_forced(engine: Engine, prompt: list[int], greedy: list[int]) -> np.ndarray[Any, Any]:
    """Logits before each token of `greedy`."""
    engine.cells.truncate(0)
    first = engine.prefill(prompt)
    rest = engine.forward(greedy[:-1], engine.cells.rows(len(greedy) - 1), n_outputs=len(greedy) - 1)
    return np.stack([first, *rest])


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
