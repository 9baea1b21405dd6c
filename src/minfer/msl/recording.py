"""Launches as data, and lists of them that run with one call into native code."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import runtime
from .checks import Binding, Checked, Finding, Report
from .errors import LaunchError
from .library import check_sizes, fill_threadgroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .device import Buffer
    from .library import Kernel


@dataclass(frozen=True)
class Bound:
    """A buffer at a slot from a byte offset on. `reads` and `writes` are the byte ranges (start, length), counted from
    the offset, that the launch declares; None is what the kernel's signature allows, () nothing."""

    buffer: Buffer
    offset: int = 0
    reads: tuple[int, int] | tuple[()] | None = None
    writes: tuple[int, int] | tuple[()] | None = None


@dataclass(frozen=True)
class Launch:
    """One dispatch. `grid` is in threads; `barrier` says that everything before has finished when it starts."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    buffers: Mapping[int, Bound]
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)
    barrier: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        name = self.kernel.name
        check_sizes(name, self.grid, self.threads, self.kernel.max_threads)
        for a in self.kernel.arguments:
            if a.kind != "buffer":
                continue
            if a.index not in self.buffers:
                if not a.optional:
                    raise LaunchError(f"kernel {name}: {a.name} [[buffer({a.index})]] is not bound")
                continue
            bound = self.buffers[a.index]
            if not 0 <= bound.offset <= bound.buffer.length:
                raise LaunchError(
                    f"kernel {name}: offset {bound.offset} of {a.name} is outside its buffer "
                    f"of {bound.buffer.length} bytes"
                )
        fill_threadgroup(self.kernel, runtime.LaunchRecord(), self.threadgroup_memory)


@dataclass(frozen=True)
class Run:
    """How a recording is run: with checks, with byte counters, in which order of lanes, threadgroups and launches."""

    check: bool = False
    count: bool = False
    order: str = "forward"
    seed: int = 0
    os_threads: int | None = None


class Recording:
    """Launches in native form, ready to run again and again. Buffers stay alive as long as the recording.

    Launches between two barriers may run in any order; a run with order="shuffled" takes one by its seed.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = list(launches)
        self._records: dict[str, ctypes.Array[runtime.LaunchRecord]] = {}
        self._names = [launch.kernel.name for launch in self.launches]

    def _native(self, mode: str) -> ctypes.Array[runtime.LaunchRecord]:
        if mode in self._records:
            return self._records[mode]
        by_library: dict[int, list[Kernel]] = {}
        for launch in self.launches:
            by_library.setdefault(id(launch.kernel.library), []).append(launch.kernel)
        for kernels in by_library.values():
            kernels[0].library.prepare([(k.name, dict(k.constants)) for k in kernels], mode)
        records = (runtime.LaunchRecord * max(len(self.launches), 1))()
        for record, launch in zip(records, self.launches, strict=False):
            _fill(record, launch, mode)
        self._records[mode] = records
        return records

    def sequence(self, run: Run) -> list[int]:
        """The order in which the launches are run."""
        order = list(range(len(self.launches)))
        if run.order != "shuffled":
            return order
        rng = random.Random(run.seed)
        out: list[int] = []
        group: list[int] = []
        for i in order:
            if self.launches[i].barrier:
                rng.shuffle(group)
                out += group
                group = []
            group.append(i)
        rng.shuffle(group)
        return out + group

    def run(self, options: Run | None = None) -> list[Report]:
        """Run all launches. With `check`, one report a launch, in recorded order; else an empty list.

        Raises LaunchError when a launch cannot run to its end.
        """
        run = options or Run()
        mode = "lockstep" if run.order == "lockstep" else "checked" if run.check else "fast"
        records, names, order = self._native(mode), self._names, None
        if not self.launches:
            return []
        if run.order == "shuffled":
            order = self.sequence(run)
            shuffled = (runtime.LaunchRecord * len(order))()
            for k, i in enumerate(order):
                ctypes.memmove(
                    ctypes.addressof(shuffled[k]), ctypes.addressof(records[i]), ctypes.sizeof(runtime.LaunchRecord)
                )
            records, names = shuffled, [names[i] for i in order]
        if not run.check:
            runtime.run(records, len(names), threads=run.os_threads, order=run.order, seed=run.seed, names=names)
            self._written()
            return []
        reports = [Report("")] * len(names)
        unordered: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str]] = {}
        for k, i in enumerate(order or range(len(names))):
            launch = self.launches[i]
            one = (runtime.LaunchRecord * 1)()
            ctypes.memmove(ctypes.addressof(one), ctypes.addressof(records[k]), ctypes.sizeof(runtime.LaunchRecord))
            bindings = {slot: _binding(b) for slot, b in launch.buffers.items()}
            checked = Checked(launch.kernel, one[0], bindings, mode, count=True)
            runtime.run(one, 1, order=run.order, seed=run.seed, names=[names[k]])
            reports[i] = checked.report()
            if launch.barrier:
                unordered.clear()
            _between_launches(launch, checked, unordered, reports[i])
        return reports

    def _written(self) -> None:
        """An unchecked run may have written whatever is bound for writing."""
        for launch in self.launches:
            for a in launch.kernel.arguments:
                if a.kind == "buffer" and a.writable and a.index in launch.buffers:
                    launch.buffers[a.index].buffer.mark_initialised()


def _fill(record: runtime.LaunchRecord, launch: Launch, mode: str) -> None:
    record.entry = launch.kernel.entry(mode)
    for slot, bound in launch.buffers.items():
        record.buffer[slot] = bound.buffer.address + bound.offset
        record.length[slot] = bound.buffer.backed - bound.offset
    fill_threadgroup(launch.kernel, record, launch.threadgroup_memory)
    for i in range(3):
        record.grid[i], record.threads[i] = launch.grid[i], launch.threads[i]
        record.groups[i] = -(-launch.grid[i] // launch.threads[i])


def _binding(b: Bound) -> Binding:
    return Binding(None, b.offset, None, b.reads, b.writes, b.buffer.label, b.buffer.initialised)


def _between_launches(
    launch: Launch,
    checked: Checked,
    seen: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str]],
    report: Report,
) -> None:
    """Find bytes that this launch and an earlier one, with no barrier between, both touch, one of them writing."""
    own: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for slot, bound in launch.buffers.items():
        if (slot, 0) not in checked.maps:
            continue
        length = bound.buffer.backed
        reads, writes = own.setdefault(bound.buffer.address, (np.zeros(length, bool), np.zeros(length, bool)))
        for k, into in ((0, reads), (1, writes)):
            bits = np.unpackbits(checked.maps[slot, k], bitorder="little")[: length - bound.offset]
            into[bound.offset : bound.offset + len(bits)] |= bits.astype(bool)
    for slot, bound in launch.buffers.items():
        key = bound.buffer.address
        if key not in own or key not in seen:
            continue
        (reads, writes), (old_reads, old_writes, other) = own[key], seen[key]
        clash = np.flatnonzero((writes & (old_reads | old_writes)) | (reads & old_writes))
        if len(clash):
            name = next((a.name for a in launch.kernel.arguments if a.kind == "buffer" and a.index == slot), "")
            offset = int(clash[0]) - bound.offset
            label = f" ({bound.buffer.label})" if bound.buffer.label else ""
            kernel = launch.kernel.name
            message = (
                f"race between launches: kernel {kernel} and {other} touch {len(clash)} bytes in common, the first "
                f"at offset {offset} of {name} [[buffer({slot})]]{label}; one of them writes, and no barrier is between"
            )
            source = launch.kernel.library.unit.instances[kernel].kernel
            zero = (0, 0, 0)
            report.findings.append(
                Finding(
                    "race between launches",
                    kernel,
                    source.file,
                    source.line,
                    slot,
                    name,
                    bound.buffer.label,
                    offset,
                    len(clash),
                    zero,
                    zero,
                    None,
                    None,
                    0,
                    1,
                    message,
                )
            )
            del own[key]
    for key, (reads, writes) in own.items():
        if key in seen:
            reads, writes = reads | seen[key][0], writes | seen[key][1]
        seen[key] = (reads, writes, launch.kernel.name)
