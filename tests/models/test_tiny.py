"""Tiny random models: logits against those transformers computed in f64 (tests/tools/record_tiny_models.py)."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import TINY, TINY_MODELS, open_engine, span_rows
from minfer.errors import RequestError
from minfer.graph.fuse import FUSIONS

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_of_every_token(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    ids = recorded["ids"].tolist()
    engine = open_engine(TINY / f"{name}.gguf")
    logits = engine.forward(ids, engine.cells.rows(len(ids)), n_outputs=len(ids))
    assert logits.shape == recorded["logits"].shape
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != "gemma3"])
def test_logits_at_positions_far_apart(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    positions = recorded["far_positions"]
    assert positions.max() > 20000
    engine = open_engine(TINY / f"{name}.gguf")
    logits = engine.forward(recorded["far_ids"].tolist(), span_rows(positions), n_outputs=len(positions))
    assert np.abs(logits - recorded["far_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_tail_rows_are_the_last_rows(name: str, n_outputs: int) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    ids = recorded["ids"].tolist()
    engine = open_engine(TINY / f"{name}.gguf")
    logits = engine.forward(ids, engine.cells.rows(len(ids)), n_outputs)
    assert np.abs(logits - recorded["logits"][-n_outputs:]).max() < TOLERANCE


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_token_at_a_time(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    engine = open_engine(TINY / f"{name}.gguf")
    for i, token in enumerate(recorded["ids"].tolist()):
        logits = engine.prefill([token])
        assert np.abs(logits - recorded["logits"][i]).max() < TOLERANCE, i
    assert engine.cache.built == 1, "a decode step reuses graph, plan and program"


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_fused_and_unfused_give_the_same_bits(name: str, n_tokens: int) -> None:
    ids = np.load(TINY / f"{name}.npz")["ids"].tolist()[:n_tokens]
    results = []
    for unfused in (frozenset(), frozenset(rule.name for rule in FUSIONS)):
        engine = open_engine(TINY / f"{name}.gguf", unfused=unfused)
        results.append(engine.forward(ids, engine.cells.rows(n_tokens), n_outputs=n_tokens))
        fired = sum(engine.plan(n_tokens, n_tokens).fused.values())
        assert (fired == 0) == bool(unfused)
    assert np.array_equal(results[0], results[1])


#: Relative root-mean-square error of the logits of a random model: f16 keeps 11 bits of K and V, q8_0 about 7.
KV_CLASSES = {"f16": 2e-3, "q8_0": 0.08}


@pytest.mark.parametrize(
    ("name", "kv_format"),
    # q8_0 packs rows of whole blocks of 32 values, which those of tiny qwen2 and gemma3 are not
    [(n, f) for n in TINY_MODELS for f in KV_CLASSES if f == "f16" or n not in ("qwen2", "gemma3")],
)
def test_packed_kv_rows_stay_close(name: str, kv_format: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    ids = recorded["ids"].tolist()
    engine = open_engine(TINY / f"{name}.gguf", kv_format=kv_format)
    logits = engine.forward(ids, engine.cells.rows(len(ids)), n_outputs=len(ids))
    difference = np.sqrt(np.mean((logits - recorded["logits"]) ** 2)) / recorded["logits"].std()
    assert 1e-6 < difference < KV_CLASSES[kv_format]


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_kv_format_that_does_not_fit_the_rows_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"KV row of (8|48) values cannot be q8_0.*multiple of 32"):
        open_engine(TINY / f"{name}.gguf", kv_format="q8_0")
