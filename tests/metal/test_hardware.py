"""On a Mac only: the Metal device on its GPU, against numpy and recorded logits. Elsewhere it is skipped.

Nothing here has been seen to run yet (docs/metal.md); a failure is news, and a report is welcome.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scenario import exercise

from helpers import TINY, TINY_MODELS, open_engine

pytestmark = pytest.mark.skipif(sys.platform != "darwin", reason="a Mac's GPU is needed")

#: Of logits in f32 against f64 ones: exp and rsqrt are the GPU's own.
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_METAL_REPLAY", "0")


def test_launches_copies_and_mapped_memory() -> None:
    from minfer.backends.gpu.devices.metal import MetalDevice

    exercise(MetalDevice())


def test_pyobjc_lets_go_of_what_it_is_given() -> None:
    from minfer.backends.gpu.devices.metal import PAGE, MetalDevice

    metal = MetalDevice()
    assert metal.references == 1
    before = metal.memory()[0]
    for _ in range(8):
        metal.buffer(64 << 20, "short-lived")
    assert before - metal.memory()[0] < (64 << 20) + PAGE
    metal.close()


def test_replay_gives_the_same_bits() -> None:
    from minfer.backends.gpu.devices.metal import MetalDevice
    from minfer.backends.gpu.devices.metal.self_test import attempt

    metal = MetalDevice()
    if reason := metal.replayable():
        pytest.skip(reason)
    assert attempt(metal) == "same"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_of_tiny_models(name: str) -> None:
    recorded = np.load(TINY / f"{name}.npz")
    ids = recorded["ids"].tolist()
    engine = open_engine(TINY / f"{name}.gguf", device="metal")
    logits = engine.forward(ids, engine.cells.rows(len(ids)), n_outputs=len(ids))
    engine.close()
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE
