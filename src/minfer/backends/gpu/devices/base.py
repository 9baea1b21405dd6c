"""The contract of a device under the GPU backend: memory, kernels, and lists of launches that run in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from minfer.backends.base import Check
    from minfer.backends.gpu.launch import Launch
    from minfer.backends.gpu.lower import Profile


@dataclass(frozen=True, slots=True)
class Bound:
    """A binding of a launch, resolved: the kernel's pointer is `offset` bytes into `buffer`, and it touches
    `[start, end)` counted from there."""

    slot: int
    buffer: Any
    offset: int
    start: int
    end: int
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A launch with its buffers, and whether everything before it must have finished when it starts."""

    launch: Launch
    bound: tuple[Bound, ...]
    barrier: bool


class Recording(Protocol):
    """Steps in the device's own form. Running them again lowers and encodes nothing."""

    def run(self) -> None: ...


class Device(ABC):
    """A GPU. Buffers are opaque; a fault raises `DeviceError` with the launch's name, and the device stays dead."""

    profile: Profile
    runs_ahead: bool = False  # what was submitted runs while the host does something else
    chains: bool = False  # `fetch` waits for no work after it
    caveat: str = ""  # what a speed measured here does not say

    @abstractmethod
    def buffer(self, nbytes: int, label: str) -> Any:
        """New zeroed memory. Raises `DeviceMemoryError` with both numbers."""

    @abstractmethod
    def wrap(self, address: int, nbytes: int, keep: object, label: str) -> tuple[Any, int]:
        """A buffer over host memory, without a copy, and the offset of `address` in it. Unified memory only."""

    @abstractmethod
    def write(self, buffer: Any, offset: int, data: bytes | memoryview) -> None: ...

    @abstractmethod
    def read(self, buffer: Any, offset: int, nbytes: int) -> bytes: ...

    def fetch(self, buffer: Any, offset: int, nbytes: int) -> Callable[[], bytes]:
        """The bytes as they are after all work submitted so far, to be called for."""
        self.synchronize()
        data = self.read(buffer, offset, nbytes)
        return lambda: data

    @abstractmethod
    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, nbytes: int) -> None:
        """Move bytes on the device, after all work before. The ranges do not overlap."""

    @abstractmethod
    def encode(self, steps: Sequence[Step]) -> None:
        """Run once, without keeping anything."""

    @abstractmethod
    def record(self, steps: Sequence[Step]) -> Recording:
        """Encode for running many times."""

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Compile the kernels of many launches together, where that is cheaper than one by one; how many variants."""
        return 0

    def facts(self) -> dict[str, str]:
        """What this device is, for a report. Nothing that tells whose machine it is."""
        return {}

    def checks(self, *, risky: bool) -> Iterator[Check]:
        """What the device's code takes for granted, tried; `risky` also what may take the system down with it."""
        return iter(())

    def times(self, steps: Sequence[Step]) -> list[float]:
        """Run once, and give the seconds of each step by the device's clock. `UnsupportedError` says why not."""
        raise UnsupportedError(f"{self.profile.name} has no clock for single launches")

    @abstractmethod
    def synchronize(self) -> None:
        """Wait, bounded, until all submitted work is done. Raises `DeviceError` if it is not."""

    @abstractmethod
    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes, or None where the device does not tell."""

    @abstractmethod
    def close(self) -> None: ...
