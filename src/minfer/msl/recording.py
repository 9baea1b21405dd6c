"""Launches as data, and lists of them that run with one call into native code."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field
from itertools import accumulate
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
    """One dispatch. `grid` is in threads; `barrier` says that everything before has finished when it starts;
    `most_threadgroup_bytes` is for kernels of a device that has more than an Apple GPU."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    buffers: Mapping[int, Bound]
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)
    barrier: bool = True
    label: str = ""
    most_threadgroup_bytes: int = runtime.MAX_THREADGROUP_BYTES

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
        fill_threadgroup(self.kernel, runtime.LaunchRecord(), self.threadgroup_memory, self.most_threadgroup_bytes)


@dataclass(frozen=True)
class Run:
    """How a recording is run: with checks, with byte counters, in which order of lanes, threadgroups and launches, and
    how many seconds no threadgroup may begin or end."""

    check: bool = False
    count: bool = False
    order: str = "forward"
    seed: int = 0
    os_threads: int | None = None
    timeout: float = runtime.TIMEOUT_S


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
            runtime.run(
                records,
                len(names),
                threads=run.os_threads,
                order=run.order,
                seed=run.seed,
                names=names,
                timeout=run.timeout,
            )
            self._written()
            return []
        reports = [Report("")] * len(names)
        unordered: list[Touch] = []
        epochs, epoch = list(accumulate(launch.barrier for launch in self.launches)), None
        for k, i in enumerate(order or range(len(names))):
            launch = self.launches[i]
            alone = (i == 0 or launch.barrier) and (i + 1 == len(names) or self.launches[i + 1].barrier)
            one = (runtime.LaunchRecord * 1)()
            ctypes.memmove(ctypes.addressof(one), ctypes.addressof(records[k]), ctypes.sizeof(runtime.LaunchRecord))
            bindings = {slot: _binding(b) for slot, b in launch.buffers.items()}
            checked = Checked(launch.kernel, one[0], bindings, mode, count=run.count or not alone)
            runtime.run(one, 1, order=run.order, seed=run.seed, names=[names[k]], timeout=run.timeout)
            reports[i] = checked.report()
            if epochs[i] != epoch:  # the launch that has the barrier need not come first in a shuffled order
                unordered.clear()
                epoch = epochs[i]
            if not alone:
                own = _touches(launch, checked)
                _between_launches(launch, own, unordered, reports[i])
                unordered += own
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
    fill_threadgroup(launch.kernel, record, launch.threadgroup_memory, launch.most_threadgroup_bytes)
    for i in range(3):
        record.grid[i], record.threads[i] = launch.grid[i], launch.threads[i]
        record.groups[i] = -(-launch.grid[i] // launch.threads[i])


def _binding(b: Bound) -> Binding:
    return Binding(None, b.offset, None, b.reads, b.writes, b.buffer.label, b.buffer.initialised)


@dataclass(frozen=True)
class Touch:
    """Bytes of a buffer that a launch read (or wrote): `bits[k]` is for the byte at address `start + k`."""

    kernel: str
    slot: int
    write: bool
    start: int
    bits: np.ndarray[Any, np.dtype[np.bool_]]


def _touches(launch: Launch, checked: Checked) -> list[Touch]:
    """What a launch touched, cut to the stretch that it touched at all: a weight buffer may be large."""
    out = []
    for (slot, write), bitmap in checked.maps.items():
        some = np.flatnonzero(bitmap)
        if len(some) and slot in launch.buffers:
            bits = np.unpackbits(bitmap[some[0] : some[-1] + 1], bitorder="little").astype(bool)
            start = launch.buffers[slot].buffer.address + launch.buffers[slot].offset + 8 * int(some[0])
            out.append(Touch(launch.kernel.name, slot, bool(write), start, bits))
    return out


def _between_launches(launch: Launch, own: Sequence[Touch], seen: Sequence[Touch], report: Report) -> None:
    """Find bytes that this launch and an earlier one, with no barrier between, both touch, one of them writing."""
    for a in own:
        for b in seen:
            first, last = max(a.start, b.start), min(a.start + len(a.bits), b.start + len(b.bits))
            if first >= last or not (a.write or b.write):
                continue
            clash = np.flatnonzero(a.bits[first - a.start : last - a.start] & b.bits[first - b.start : last - b.start])
            if not len(clash):
                continue
            bound, kernel = launch.buffers[a.slot], launch.kernel
            name = next((p.name for p in kernel.arguments if p.kind == "buffer" and p.index == a.slot), "")
            offset = first + int(clash[0]) - bound.buffer.address - bound.offset
            label = f" ({bound.buffer.label})" if bound.buffer.label else ""
            does, did = ("writes" if t.write else "reads" for t in (a, b))
            message = (
                f"race between launches: kernel {kernel.name} {does} {len(clash)} bytes, the "
                f"first at offset {offset} of {name} [[buffer({a.slot})]]{label}, which kernel {b.kernel} "
                f"{did} with no barrier between"
            )
            source = kernel.library.unit.instances[kernel.name].kernel
            report.findings.append(
                Finding(
                    "race between launches", kernel.name, source.file, source.line, a.slot, name, bound.buffer.label,
                    offset, len(clash), (0, 0, 0), (0, 0, 0), None, None, 0, 1, message,
                )
            )  # fmt: skip
            break
