"""`--profile`: host time on every device, and the launches of a step by the GPU's clock where it has one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from test_doctor_metal import on_the_clock

from helpers import TINY, open_engine
from minfer.backends.base import LaunchTime
from minfer.backends.profile import Profile, launch_table
from minfer.cli import generate

if TYPE_CHECKING:
    from fakemetal import Runtime

PATH = TINY / "qwen3.gguf"


@pytest.mark.parametrize("replay", ["0", "1"])
def test_the_launches_of_a_step_are_timed(replay: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order and number that the plan has, and the step's values and rows stay what they were."""
    monkeypatch.setenv("MINFER_METAL_REPLAY", replay)
    logits = {}
    for timed in (False, True):
        engine = open_engine(PATH, device="metal")
        on_the_clock(mac, monkeypatch)
        for token in (1, 5, 9):
            row = engine.prefill([token])
            if timed:
                times = engine.launch_times()["metal"]
                (listed,) = [listed.to_json()["launches"] for _, listed in engine.launches(engine.plan(1)) if listed]
                assert isinstance(times, list)
                assert [(t.node, t.kernel) for t in times] == [(v["node"], v["kernel"]) for v in listed]
                threadgroups = [np.prod(v["grid"]) for v in listed]
                assert [t.seconds for t in times] == pytest.approx([1e-6 * int(n) for n in threadgroups], abs=1e-7)
            logits.setdefault(timed, []).append(row.tobytes())
        engine.close()
    assert logits[True] == logits[False]


def test_profile_says_what_is_timed(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(PATH, device="metal")
    on_the_clock(mac, monkeypatch)
    measured = engine.start_profile()
    for token in (1, 5, 9):
        engine.prefill([token])
    text = generate.profile(SimpleNamespace(engine=engine), measured)
    assert "metal: replay" in text
    assert "metal: wait" in text
    assert "launches of the last step, by the clock of metal:\n" in text
    assert "project_t1 " in text
    mac.faults.no_sample_buffer = True
    text = generate.profile(SimpleNamespace(engine=engine), measured)
    assert "launches on metal are not timed: Apple M3 (pretended) samples no" in text
    engine.close()


@pytest.mark.parametrize("device", ["simulator", "reference"])
def test_elsewhere_the_reason_is_said(device: str) -> None:
    engine = open_engine(PATH, device=device)
    assert engine.launch_times() == {}, "nothing ran yet"
    engine.prefill([1])
    text = generate.profile(SimpleNamespace(engine=engine), Profile())
    assert text == f"\n\nlaunches on {device} are not timed: {device} has no clock for single launches"
    engine.close()


def test_the_table_sums_by_kernel() -> None:
    times = [LaunchTime("a", "gemm", 1e-3), LaunchTime("b", "norm", 2.5e-4), LaunchTime("c", "norm", 2.5e-4)]
    gemm, norm = launch_table(times).splitlines()
    assert gemm.split() == ["gemm", "1.000", "ms", "66.7%", "1", "x", "1000.0", "us", "each"]
    assert norm.split() == ["norm", "0.500", "ms", "33.3%", "2", "x", "250.0", "us", "each"]
