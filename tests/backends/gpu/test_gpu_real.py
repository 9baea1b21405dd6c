"""SmolLM2 and Gemma 3 on the simulator: against the logits that another program recorded, and in every KV format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers import open_engine
from integration.test_real_models import MODELS, TOLERANCE, Recorded
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.launch import LaunchList

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest) -> tuple[str, Path, Recorded]:
    path = request.getfixturevalue("smollm_path" if request.param == MODELS[0] else "gemma_path")
    return request.param, path, Recorded(request.param)


@pytest.mark.parametrize("prompt", ["short", "chat"])
def test_logits_equal_the_recorded_ones(real: tuple[str, Path, Recorded], prompt: str) -> None:
    _, path, recorded = real
    ids, greedy = (recorded.prompts[prompt][key] for key in ("prompt_ids", "greedy_ids"))
    margins = np.array(recorded.prompts[prompt]["greedy_margin"])
    engine = open_engine(path, n_ctx=1024, device="simulator")
    logits = engine.prefill(ids)
    assert np.abs(logits - recorded.logits[prompt]).max() < TOLERANCE
    # The recorded tokens are fed one at a time: steps that replay one recording.
    sure = 0
    for token, following, margin in zip(greedy[:5], greedy[1:6], margins[1:6], strict=True):
        chosen = int(engine.prefill([token]).argmax())
        if margin > 1.0:
            assert chosen == following
            sure += 1
    assert sure
    device = engine.backends["simulator"].device
    assert device.encoded == (1 if len(ids) == 1 else 2)  # a prompt of one token is a decode step
    assert device.recorded == 1


#: Of the logits' spread: the rows round alike on both devices, but a q8_0 code may differ by one where a sum does.
FORMATS = {"f32": 1e-4, "f16": 5e-3, "q8_0": 5e-2}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_kv_format_agrees_with_the_reference(real: tuple[str, Path, Recorded], kv_format: str) -> None:
    _, path, recorded = real
    ids = recorded.prompts["short"]["prompt_ids"]
    results = []
    for device in ("reference", "simulator"):
        engine = open_engine(path, n_ctx=512, device=device, kv_format=kv_format)
        results.append(np.stack([engine.prefill(ids), engine.prefill([5]), engine.prefill([6, 7])]))
        engine.close()
    assert np.abs(results[1] - results[0]).max() < FORMATS[kv_format] * results[0].std()


def test_a_decode_step_of_smollm2_reads_its_weights_once(smollm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """182 to 212 launches; matrices and KV rows are read at most 1.05 times, counted by the checked device."""

    def counted(kv_format: str) -> GpuBackend:
        return GpuBackend(SimulatorDevice(check=True), kv_format)

    engine = open_engine(smollm_path, n_ctx=512, device="simulator")
    ((_, listed),) = engine.launches(engine.plan())
    assert isinstance(listed, LaunchList)
    assert len(listed.launches) == 7 * 30 + 2
    engine.close()
    monkeypatch.setitem(__import__("minfer.backends", fromlist=["_"]).DEVICES, "simulator", counted)
    engine = open_engine(smollm_path, n_ctx=512, device="simulator")
    engine.prefill([1])
    backend = engine.backends["simulator"]
    assert isinstance(backend, GpuBackend)
    used = read = 0
    for step, report in backend.device.reports:
        launch = step.launch
        for b in launch.bindings:
            if b.ref.space == "weight" and launch.kernel.startswith("project") and b.slot in (3, 4, 5):
                used += b.nbytes
                read += report.counters.read[b.slot]
            elif b.ref.space in ("k", "v") and not b.writes:
                used += backend.regions[int(b.ref.key)].row_bytes
                read += report.counters.read[b.slot]
    assert used > 80e6
    assert used <= read <= 1.05 * used
