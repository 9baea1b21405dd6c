"""A real model over the fake: SmolLM2-135M, 12 tokens, direct and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers import open_engine

if TYPE_CHECKING:
    from pathlib import Path

    from fakemetal import Runtime

N = 12


@pytest.mark.slow
def test_twelve_tokens(smollm_path: Path, mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [1, 504, 3575, 282, 4649, 314]  # "<|im_start|>The capital of France is"
    tokens: list[list[int]] = []
    logits: list[list[bytes]] = []
    for device, replay in (("simulator", ""), ("metal", "0"), ("metal", "1")):
        monkeypatch.setenv("MINFER_METAL_REPLAY", replay)
        engine = open_engine(smollm_path, device=device, n_ctx=64, kv_format="f16")
        row, chosen, seen = engine.prefill(prompt), [], []
        for _ in range(N):
            seen.append(row.tobytes())
            chosen.append(int(np.argmax(row)))
            row = engine.prefill(chosen[-1:])
        engine.close()
        tokens.append(chosen)
        logits.append(seen)
    assert tokens[1] == tokens[2] == tokens[0]
    assert logits[1] == logits[2] == logits[0]
    assert len(set(tokens[0])) > 4, "text, not one token for ever"
