"""How long each launch took by the GPU's own clock: an encoder a launch, sampled where it begins and where it ends.

That is the one place where Apple GPUs sample. It is another encoding than a step's: nothing runs at the same time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.backends.gpu.devices.metal.bridge import error_text
from minfer.backends.gpu.devices.metal.encode import Direct, Encoded
from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.backends.gpu.devices.base import Step
    from minfer.backends.gpu.devices.metal import MetalDevice

#: Launches that are sampled together: a sample buffer holds 4,096 samples, and a launch takes two.
MOST_LAUNCHES = 1024
#: Between two looks at the GPU's clock beside the host's, which tell how many ticks a second has.
CALIBRATION_S = 0.02


class Counters:
    """The timestamp counters of a device, and the length of a tick. `UnsupportedError` says what it lacks."""

    def __init__(self, device: MetalDevice) -> None:
        self._device, metal = device, device.metal
        with device.pool():
            if not device.gpu.supportsCounterSampling_(metal.MTLCounterSamplingPointAtStageBoundary):
                raise UnsupportedError(f"{device.name} samples no counters where an encoder begins and ends")
            wanted = str(metal.MTLCommonCounterSetTimestamp)
            found = [one for one in device.gpu.counterSets() or () if str(one.name()) == wanted]
            if not found:
                raise UnsupportedError(f"{device.name} has no counters of time")
            self._set = found[0]
            self.ticks_per_second = self._calibrate()

    def _calibrate(self) -> float:
        """In ticks of the GPU a second of the host, whatever unit macOS gives them in."""
        looks = []
        for pause in (CALIBRATION_S, 0.0):
            _, ticks = self._device.gpu.sampleTimestamps_gpuTimestamp_(None, None)
            looks.append((time.perf_counter(), int(ticks)))
            time.sleep(pause)
        (start, first), (end, last) = looks
        if last <= first:
            raise UnsupportedError(f"the clock of {self._device.name} stands still")
        return (last - first) / (end - start)

    def samples(self, count: int) -> Any:
        metal = self._device.metal
        descriptor = metal.MTLCounterSampleBufferDescriptor.alloc().init()
        descriptor.setCounterSet_(self._set)
        descriptor.setStorageMode_(metal.MTLStorageModeShared)
        descriptor.setSampleCount_(count)
        made, error = self._device.gpu.newCounterSampleBufferWithDescriptor_error_(descriptor, None)
        if made is None:
            raise UnsupportedError(f"{self._device.name} samples no {count} counters: {error_text(error)}")
        return made

    def times(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps once; the seconds of each."""
        found: list[float] = []
        for start in range(0, len(steps), MOST_LAUNCHES):
            found += Sampled(self._device, steps[start : start + MOST_LAUNCHES], self).seconds()
        return found


class Sampled(Direct):
    """Steps, each in an encoder of its own between two samples."""

    def __init__(self, device: MetalDevice, steps: Sequence[Step], counters: Counters) -> None:
        super().__init__(device, steps, keep=False)
        self._counters = counters
        with device.pool():
            self._samples = counters.samples(2 * len(steps))
        self._ticks = device.buffer(16 * len(steps), "samples of counters")

    def seconds(self) -> list[float]:
        self.run()
        raw = np.frombuffer(self._device.read(self._ticks, 0, 16 * len(self._steps)), np.uint64).reshape(-1, 2)
        if (raw == np.uint64(self._device.metal.MTLCounterErrorValue)).any() or (raw[:, 1] < raw[:, 0]).any():
            raise UnsupportedError(f"{self._device.name} took not every sample of {self._what}")
        ticks: list[int] = (raw[:, 1] - raw[:, 0]).tolist()
        return [count / self._counters.ticks_per_second for count in ticks]

    def _encode(self, commands: Any) -> None:
        for i, encoded in enumerate(self._encoded):
            self._sampled(commands, encoded, 2 * i)
        encoder = self._device.made(commands.blitCommandEncoder(), "a blit encoder")
        encoder.resolveCounters_inRange_destinationBuffer_destinationOffset_(
            self._samples, (0, 2 * len(self._steps)), self._ticks.object, 0
        )
        encoder.endEncoding()

    def _sampled(self, commands: Any, encoded: Encoded, first: int) -> None:
        made = self._device.metal.MTLComputePassDescriptor.computePassDescriptor()
        attachment = made.sampleBufferAttachments().objectAtIndexedSubscript_(0)
        attachment.setSampleBuffer_(self._samples)
        attachment.setStartOfEncoderSampleIndex_(first)
        attachment.setEndOfEncoderSampleIndex_(first + 1)
        encoder = self._device.made(commands.computeCommandEncoderWithDescriptor_(made), "a compute encoder")
        try:
            self.put(encoder, [encoded])
        finally:
            encoder.endEncoding()
