"""Where weights lie, how large a buffer may be, and what traces, profiles and closing do to a device's programs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers import TINY, open_engine
from minfer import backends
from minfer.backends.gpu.backend import GpuBackend, GpuProgram
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.weights import ALIGNMENT, register
from minfer.errors import DeviceError
from minfer.gguf import open_model
from minfer.graph.ir import Weight

IDS = [1, 2, 3, 4, 5]
#: Bytes of a buffer; wrapped runs keep two pages of 16 KiB in hand, and a few tensors of the tiny model fit.
LIMIT = 1 << 17


def limited(*, unified: bool = True, limit: int = LIMIT) -> SimulatorDevice:
    device = SimulatorDevice()
    device.profile = dataclasses.replace(device.profile, max_buffer_bytes=limit, unified_memory=unified)
    return device


@pytest.mark.parametrize("unified", [True, False])
def test_weights_are_split_below_the_largest_buffer(unified: bool) -> None:
    """Every byte of every weight is found where it is said to be, in buffers of up to the limit; one copy, or none."""
    with open_model(TINY / "qwen3.gguf") as model:
        weights = [Weight(name, t.format.name, t.shape) for name, t in model.tensors.items()]
        assert sum(t.nbytes for t in model.tensors.values()) > LIMIT > max(t.nbytes for t in model.tensors.values())
        device = limited(unified=unified)
        told: list[tuple[int, int | None, str]] = []
        found = register(device, model, weights, lambda *what: told.append(what))
        buffers = {id(buffer): buffer for buffer, _ in found.values()}
        assert len(buffers) > 1
        assert all(buffer.length <= LIMIT for buffer in buffers.values())
        for name, (buffer, offset) in found.items():
            data = model.data(name)
            assert device.read(buffer, offset, data.nbytes) == data.tobytes()
            assert (buffer.address + offset == data.ctypes.data) == unified
        sizes = [t.nbytes for t in model.tensors.values()]
        uploads = [(sum(sizes[:i]), sum(sizes), "uploading weights to simulator") for i in range(len(sizes))]
        assert told == ([] if unified else uploads)
        if not unified:
            whole = sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in model.tensors.values())
            assert sum(buffer.length for buffer in buffers.values()) == whole
        del found, buffers, buffer


def test_a_model_in_several_buffers_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_engine(TINY / "qwen3.gguf", device="simulator").prefill(IDS)
    for unified in (True, False):
        monkeypatch.setitem(backends.DEVICES, "simulator", lambda kv, u=unified: GpuBackend(limited(unified=u), kv))
        assert np.array_equal(open_engine(TINY / "qwen3.gguf", device="simulator").prefill(IDS), whole)


def test_a_trace_is_a_program_of_its_own() -> None:
    """Its values are the reference's, and the recorded decode step neither changes nor is recorded again."""
    traced = {}
    for name in ("reference", "simulator"):
        engine = open_engine(TINY / "qwen3.gguf", device=name)
        engine.prefill(IDS)
        before = [engine.prefill([7]), engine.prefill([8])][1]
        engine.cells.truncate(len(IDS) + 1)
        traced[name] = {node.name: value for node, value in engine.trace([8], engine.cells.rows(1), 1)}
        assert np.array_equal(engine.prefill([8]), before)
    assert list(traced["simulator"]) == list(traced["reference"])
    for name, value in traced["reference"].items():
        assert np.abs(traced["simulator"][name] - value).max() < 1e-4, name
    backend = engine.backends["simulator"]
    assert isinstance(backend, GpuBackend)
    assert backend.device.recorded == 1


def test_a_profile_tells_where_host_time_goes_and_is_off_until_asked_for() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="simulator")
    engine.prefill(IDS)
    assert all(backend.profile is None for backend in engine.backends.values())
    profile = engine.start_profile()
    for token in (5, 6, 7):
        engine.prefill([token])
    assert profile.calls == {
        "simulator: row checks": 3,
        "simulator: encode": 2,  # the first runs directly, the second is recorded
        "simulator: replay": 1,
        "simulator: wait": 3,
    }


def test_closing_ends_a_recording() -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="simulator")
    for token in (5, 6, 7):
        engine.prefill([token])
    (program,) = engine.cache.get(engine.params(1)).programs
    assert isinstance(program, GpuProgram)
    (recording,) = program._recordings.values()
    assert recording is not None
    recording.run()
    engine.close()
    with pytest.raises(DeviceError, match="the simulator is closed"):
        recording.run()
