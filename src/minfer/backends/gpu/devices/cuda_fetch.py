"""Results on their way from an NVIDIA GPU to the host, waited for one by one."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minfer.backends.gpu.devices.cuda import CudaDevice

#: The least pinned memory of a fetch.
LEAST = 4096

Lent = tuple[Any, int, int]  # an event, the address of pinned memory, its bytes


class Fetches:
    """Events and pinned memory, lent to one fetch after the other."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.free: list[Lent] = []
        self._all: list[Lent] = []

    def start(self, address: int, nbytes: int) -> Fetch:
        """Copy what device memory holds after all work submitted so far."""
        call, stream = self.device.call, self.device.stream
        fetch = Fetch(self, self._lend(nbytes), nbytes)
        event, pinned, _ = fetch.lent
        call("cuMemcpyDtoHAsync", pinned, address, nbytes, stream)
        call("cuEventRecord", event, stream)
        return fetch

    def _lend(self, nbytes: int) -> Lent:
        for i, found in enumerate(self.free):
            if found[2] >= nbytes:
                return self.free.pop(i)
        size = max(nbytes, LEAST)
        flags = int(self.device.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        made = self.device.call("cuEventCreate", flags), int(self.device.call("cuMemHostAlloc", size, 0)), size
        self._all.append(made)
        return made

    def close(self) -> None:
        for event, pinned, _ in self._all:
            self.device.driver.cuEventDestroy(event)
            self.device.driver.cuMemFreeHost(pinned)


class Fetch:
    """Called, it waits for its bytes alone and gives them. What it was lent goes back with the last reference."""

    __slots__ = ("_fetches", "_nbytes", "lent")

    def __init__(self, fetches: Fetches, lent: Lent, nbytes: int) -> None:
        self._fetches, self.lent, self._nbytes = fetches, lent, nbytes

    def __call__(self) -> bytes:
        device, (event, pinned, _) = self._fetches.device, self.lent
        device.check()
        device.wait("cuEventQuery", event)
        return ctypes.string_at(pinned, self._nbytes)

    def __del__(self) -> None:
        self._fetches.free.append(self.lent)
