"""GPU traces for Xcode."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from minfer.backends.gpu.devices.metal.bridge import error_text
from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from minfer.backends.gpu.devices.metal import MetalDevice

#: Submissions that a trace holds.
SUBMISSIONS = 4


#: Metal makes one trace at a time: the device that submits first has it.
_taken: list[object] = []


class Capture:
    """A GPU trace for Xcode of a process's first submissions, to the path in `MINFER_METAL_CAPTURE`."""

    def __init__(self, device: MetalDevice) -> None:
        self._path = os.environ["MINFER_METAL_CAPTURE"]
        self._device = device
        self._manager = device.metal.MTLCaptureManager.sharedCaptureManager()
        self._left = SUBMISSIONS
        self._running = False
        if not self._manager.supportsDestination_(device.metal.MTLCaptureDestinationGPUTraceDocument):
            raise UnsupportedError(
                "MINFER_METAL_CAPTURE: start Python with METAL_CAPTURE_ENABLED=1 to allow GPU traces"
            )

    def start(self) -> None:
        if not self._left or (_taken and _taken[0] is not self):
            return
        self._left -= 1
        if self._running:
            return
        metal = self._device.metal
        with self._device.pool():
            descriptor = metal.MTLCaptureDescriptor.alloc().init()
            descriptor.setCaptureObject_(self._device.gpu)
            descriptor.setDestination_(metal.MTLCaptureDestinationGPUTraceDocument)
            descriptor.setOutputURL_(self._device.foundation.NSURL.fileURLWithPath_(self._path))
            started, error = self._manager.startCaptureWithDescriptor_error_(descriptor, None)
            if not started:
                raise UnsupportedError(f"MINFER_METAL_CAPTURE={self._path}: {error_text(error)}")
        _taken.append(self)
        self._running = True

    def waited(self) -> None:
        if not self._left:
            self.stop()

    def stop(self) -> None:
        if self._running:
            self._manager.stopCapture()
            self._running = False
            self._left = 0
