"""The software Metal device: the real kernels, on any CPU, slowly; with checks and byte counters when asked."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from minfer.backends.gpu.devices.base import Device, Step
from minfer.backends.gpu.kernels import source
from minfer.backends.gpu.lower import Profile
from minfer.backends.gpu.lower.choose import tiers_off
from minfer.errors import DeviceError, DeviceMemoryError, UnsupportedError
from minfer.msl.compiler import select
from minfer.msl.device import PAGE, Buffer
from minfer.msl.device import Device as SoftwareDevice
from minfer.msl.errors import MslError, ToolError
from minfer.msl.library import Kernel, Library
from minfer.msl.recording import Bound as NativeBound
from minfer.msl.recording import Launch as NativeLaunch
from minfer.msl.recording import Recording as NativeRecording
from minfer.msl.runtime import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from minfer.backends.gpu.launch import Constant, Launch
    from minfer.msl.checks import Report

#: Kernel variants in one compilation: few enough that the processors share the work.
CHUNK = 20
#: Offset alignment of an argument struct in the arena that holds those of a list of launches.
ARGUMENT_ALIGNMENT = 256


@cache
def library(family: str) -> Library:
    """A family's kernels, parsed once a process."""
    return Library(source(family), name=f"{family}.metal")


def variants(launches: Iterable[Launch]) -> list[Launch]:
    """One launch for each kernel and set of constants, by family."""
    found: dict[tuple[object, ...], Launch] = {}
    for launch in launches:
        found.setdefault((launch.family, launch.kernel, launch.constants), launch)
    return sorted(found.values(), key=lambda launch: launch.family)


def prepare(launches: Iterable[Launch], mode: str = "fast") -> int:
    """Compile the kernels of many launches together, on all processors: much cheaper than one by one. Their number."""
    wanted = variants(launches)
    for family in {launch.family for launch in wanted}:
        library(family)
    parts = [wanted[i : i + CHUNK] for i in range(0, len(wanted), CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda part: _prepare(part, mode), parts))
    return len(wanted)


def _prepare(some: Sequence[Launch], mode: str) -> None:
    families: dict[str, list[tuple[str, dict[str, Constant]]]] = {}
    for launch in some:
        families.setdefault(launch.family, []).append((launch.kernel, dict(launch.constants)))
    for family, wanted in families.items():
        library(family).prepare(wanted, mode)


class SimulatorRecording:
    """Native launches, and the device whose order and checks they run with."""

    def __init__(self, device: SimulatorDevice, steps: Sequence[Step]) -> None:
        self._device = device
        self.steps = steps
        arena, offsets = device.arena(steps)
        self._native = NativeRecording([device.native(s, arena, at) for s, at in zip(steps, offsets, strict=True)])

    def run(self) -> None:
        self._device.run(self._native, self.steps)


class SimulatorDevice(Device):
    """`check` runs every launch with all checks and keeps a report of each in `reports`; a finding raises.

    `order` (forward, backward, shuffled by `seed`, lockstep) is the order of lanes, threadgroups and launches that no
    barrier orders. A launch of which no threadgroup ends for `timeout` seconds is given up.
    """

    caveat = "software: nothing about a GPU's speed"

    def __init__(
        self, *, check: bool = False, order: str = "forward", seed: int = 0, timeout: float = TIMEOUT_S
    ) -> None:
        self._device = SoftwareDevice(check=check, count=check, order=order, seed=seed, timeout=timeout)
        self.profile = Profile(
            "simulator",
            unified_memory=True,
            max_threads=self._device.max_threads_per_threadgroup,
            max_threadgroup_bytes=self._device.max_threadgroup_memory_length,
            max_buffer_bytes=1 << 32,
            off=tiers_off(),
        )
        self.reports: list[tuple[Step, Report]] = []
        self.encoded = self.recorded = 0
        self._dead, self._closed = "", False

    def facts(self) -> dict[str, str]:
        try:
            return {"compiler": select().version}
        except ToolError as error:
            return {"compiler": str(error)}

    def prepare(self, launches: Sequence[Launch]) -> int:
        try:
            return prepare(launches, "checked" if self._device.run.check else "fast")
        except MslError as error:
            raise UnsupportedError(f"the simulator compiles its kernels: {error}") from error

    def buffer(self, nbytes: int, label: str) -> Buffer:
        try:
            return self._device.buffer(max(nbytes, 16), label=label)
        except (MslError, OSError, MemoryError) as error:
            known = self.memory()
            free = f"{known[0]:,}" if known else "an unknown number of"
            raise DeviceMemoryError(f"{label}: {nbytes:,} bytes asked for, {free} bytes free ({error})") from error

    def wrap(self, address: int, nbytes: int, keep: object, label: str) -> tuple[Buffer, int]:
        offset = address % mmap.PAGESIZE
        length = -(-(offset + nbytes) // PAGE) * PAGE
        base = address - offset
        return self._device.buffer_no_copy(base, length, keep=keep, backed=offset + nbytes, label=label), offset

    def write(self, buffer: Buffer, offset: int, data: bytes | memoryview) -> None:
        buffer.write(data, offset)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        return buffer.read(offset, nbytes)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        target.write(source.read(source_offset, nbytes), target_offset)

    def encode(self, steps: Sequence[Step]) -> None:
        self.encoded += 1
        SimulatorRecording(self, steps).run()

    def record(self, steps: Sequence[Step]) -> SimulatorRecording:
        self.recorded += 1
        return SimulatorRecording(self, steps)

    def synchronize(self) -> None:
        """A run returns when it is done; what is left is whether it ended well."""
        if self._closed:
            raise DeviceError("the simulator is closed")
        if self._dead:
            raise DeviceError(f"the simulator stopped at an earlier fault: {self._dead}")

    def memory(self) -> tuple[int, int] | None:
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        except (ValueError, OSError):
            return None

    def close(self) -> None:
        """Recordings end with it: running one is an error from now on."""
        self._closed = True
        self.reports.clear()

    # --- launches in the software device's form ------------------------------------------------------------------

    def arena(self, steps: Sequence[Step]) -> tuple[Buffer, list[int]]:
        """The argument structs of all launches in one buffer, and where each lies."""
        offsets, raw = [], bytearray()
        for step in steps:
            offsets.append(len(raw))
            raw += step.launch.args
            raw += bytes(-len(raw) % ARGUMENT_ALIGNMENT)
        buffer = self.buffer(len(raw), "arguments")
        if raw:
            buffer.write(bytes(raw))
        return buffer, offsets

    def native(self, step: Step, arena: Buffer, offset: int) -> NativeLaunch:
        launch = step.launch
        buffers = {0: NativeBound(arena, offset, (0, len(launch.args)), ())}
        for b in step.bound:
            whole = (b.start, b.end - b.start)
            buffers[b.slot] = NativeBound(b.buffer, b.offset, whole if b.reads else (), whole if b.writes else ())
        x, y, z = launch.grid
        kernel = _kernel(launch.family, launch.kernel, launch.constants)
        grid, threads = (x * launch.threads, y, z), (launch.threads, 1, 1)
        memory = {0: launch.threadgroup_bytes} if launch.threadgroup_bytes else {}
        most = self.profile.max_threadgroup_bytes
        return NativeLaunch(kernel, grid, threads, buffers, memory, step.barrier, launch.node, most)

    def run(self, recording: NativeRecording, steps: Sequence[Step]) -> None:
        """Run native launches; a fault or a finding is a `DeviceError` and the end of the device."""
        self.synchronize()
        try:
            reports = recording.run(self._device.run)
        except ToolError as error:
            raise UnsupportedError(f"the simulator compiles its kernels: {error}") from error
        except MslError as error:
            self._dead = str(error)
            raise DeviceError(f"the simulator stopped: {error}") from error
        for step, report in zip(steps, reports, strict=False):
            self.reports.append((step, report))
            if report.findings:
                self._dead = f"{step.launch.node} ({step.launch.kernel}): {report}"
                raise DeviceError(self._dead)


@cache
def _kernel(family: str, name: str, constants: tuple[tuple[str, Constant], ...]) -> Kernel:
    return library(family).kernel(name, dict(constants))
