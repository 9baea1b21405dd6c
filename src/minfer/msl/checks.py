"""The checked mode from Python: what a launch declares goes in, findings and counters come out."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MslError
from .runtime import MAX_BUFFERS, LaunchRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .library import Kernel

MAX_FINDINGS = 64
POISON = 0x00F0000000000000  # native/checks.cpp: where an unbound buffer seems to lie


class FindingRecord(ctypes.Structure):
    """struct Finding of native/msl_host.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("pc", "other_pc", "offset", "size", "file", "count")),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "kind",
                "slot",
                "tid",
                "group",
                "other_tid",
                "other_group",
                "line",
                "other_line",
                "detail",
                "unused",
            )
        ),
    )


class BindingRecord(ctypes.Structure):
    """struct Binding: the declared ranges of a slot, as addresses."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("start", "end", "writable_start", "writable_end", "initialised", "initialised_from")
    )


class ChecksRecord(ctypes.Structure):
    """struct Checks."""

    _fields_ = (
        ("binding", BindingRecord * MAX_BUFFERS),
        ("image_start", ctypes.c_uint64),
        ("image_end", ctypes.c_uint64),
        ("finding", ctypes.c_uint64),
        ("max_findings", ctypes.c_uint32),
        ("findings", ctypes.c_uint32),
        ("total", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("barriers", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64 * 3),
        ("bytes", (ctypes.c_uint64 * 2) * MAX_BUFFERS),
        ("touched", (ctypes.c_uint64 * 2) * MAX_BUFFERS),
    )


# kind -> (its name, what the thread does). {at} is "N bytes at offset O of NAME".
KINDS = {
    1: ("out-of-bounds read", "reads {at}, outside what is bound"),
    2: ("out-of-bounds write", "writes {at}, outside what is bound"),
    3: ("unbound buffer", "touches memory{of}, which is not bound"),
    4: ("misaligned access", "uses offset {offset}{of} as an address that must be a multiple of {size}"),
    5: ("uninitialised read", "reads {at}, which nothing has written"),
    6: ("uninitialised threadgroup read", "reads {at}, which no thread of its threadgroup has written"),
    7: ("threadgroup race", "{this} {at}, which thread {other} {that} with no barrier between"),
    8: (
        "device race",
        "{this} {at}, which thread {other} of its threadgroup {that} with no barrier for device memory between",
    ),
    9: (
        "race between threadgroups",
        "{this} {at}, which thread {other} of threadgroup {group} {that}: nothing orders threadgroups",
    ),
    10: ("divergent barrier", "waits at a barrier while others wait at the one in line {other_line}"),
    11: (
        "barrier not reached by all",
        "belongs to a threadgroup of which some have returned while others wait at this barrier",
    ),
    12: ("divergent collective", "calls a simdgroup function while other lanes wait at the one in line {other_line}"),
    13: (
        "collective not reached by all",
        "belongs to a simdgroup of which some have returned while others wait at this simdgroup function",
    ),
    14: ("deadlock", "waits here while others wait in line {other_line}: neither is reached by all"),
    15: ("undeclared read", "reads {at}, which the launch does not declare as read"),
    16: ("undeclared write", "writes {at}, which the launch does not declare as written"),
    17: ("threadgroup out-of-bounds read", "reads {at}, outside it"),
    18: ("threadgroup out-of-bounds write", "writes {at}, outside it"),
    19: ("write to a constant", "writes to a program-scope constant"),
    20: ("index out of range", "uses index {offset}, which is outside the array"),
    21: ("division by zero", "divides an integer by zero"),
    22: (
        "too much threadgroup memory",
        "would need {offset} bytes or more of threadgroup memory; a threadgroup has {size}",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One fault. `line` is in the .metal file `file` (0 where no debug information could be read).

    `buffer` is the slot of the buffer, `name` the parameter or threadgroup variable, `label` what the caller calls the
    memory bound there; `offset` is in bytes from what is bound. `thread` and `threadgroup` are positions; `other_*`
    is the second party of a race. `count` tells how often the same place did it.
    """

    kind: str
    kernel: str
    file: str
    line: int
    buffer: int | None
    name: str
    label: str
    offset: int
    size: int
    thread: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    other_thread: tuple[int, int, int] | None
    other_threadgroup: tuple[int, int, int] | None
    other_line: int
    count: int
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class Counters:
    """What a launch did. Bytes are by buffer slot; `distinct` counts a byte once, collectives a simdgroup once."""

    barriers: int = 0
    collectives: int = 0
    simdgroup_barriers: int = 0
    matrix_operations: int = 0
    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    read_distinct: dict[int, int] = field(default_factory=dict)
    written_distinct: dict[int, int] = field(default_factory=dict)


@dataclass
class Report:
    """What a checked launch found and counted; empty findings mean that it is clean. `dropped` findings had no room."""

    kernel: str
    findings: list[Finding] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    dropped: int = 0

    def __str__(self) -> str:
        more = [f"... and {self.dropped} more"] if self.dropped else []
        return "\n".join([str(f) for f in self.findings] + more) or f"kernel {self.kernel}: no faults found"


class CheckError(MslError):
    """A checked launch found faults; `report` has them all."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(str(report))


@dataclass(frozen=True)
class Binding:
    """A buffer argument with what the launch declares about it.

    `data` is the array, `offset` and `length` the bytes bound from it (to its end unless given). `reads` and `writes`
    are the byte ranges (start, length) from `offset` that the launch may touch: None is what the kernel's signature
    allows, () nothing. `initialised` is a bit per byte of `data` (least significant first) of what
    holds values; None is all.
    """

    data: Any
    offset: int = 0
    length: int | None = None
    reads: tuple[int, int] | tuple[()] | None = None
    writes: tuple[int, int] | tuple[()] | None = None
    label: str = ""
    initialised: np.ndarray[Any, np.dtype[np.uint8]] | None = None


class Checked:
    """The native checks of one launch, and how to read them afterwards."""

    def __init__(
        self, kernel: Kernel, record: LaunchRecord, bindings: Mapping[int, Binding], mode: str, *, count: bool
    ) -> None:
        self.kernel, self.record, self.bindings = kernel, record, bindings
        self.findings = (FindingRecord * MAX_FINDINGS)()
        self.native = ChecksRecord()
        self.native.finding, self.native.max_findings = ctypes.addressof(self.findings), MAX_FINDINGS
        self.image = image_of(kernel.entry(mode))
        self.native.image_start, self.native.image_end = self.image.start, self.image.end
        self.native.count = count
        self.maps: dict[tuple[int, int], np.ndarray[Any, np.dtype[np.uint8]]] = {}
        for a in kernel.arguments:
            if a.kind == "buffer":
                self._bind(a.index, a.writable, bindings.get(a.index))
        record.checks = ctypes.addressof(self.native)

    def _bind(self, slot: int, writable: bool, binding: Binding | None) -> None:
        base, length = self.record.buffer[slot], self.record.length[slot]
        if not base:
            self.record.buffer[slot] = POISON + (slot << 40)
            return
        b = self.native.binding[slot]
        reads = (0, length) if binding is None or binding.reads is None else binding.reads or (0, 0)
        writes = (
            ((0, length) if writable else (0, 0))
            if binding is None or binding.writes is None
            else binding.writes or (0, 0)
        )
        b.start, b.end = base + reads[0], base + reads[0] + reads[1]
        b.writable_start, b.writable_end = base + writes[0], base + writes[0] + writes[1]
        if not reads[1]:
            b.start = b.end = 0
        if not writes[1]:
            b.writable_start = b.writable_end = 0
        if binding is not None and binding.initialised is not None:
            b.initialised, b.initialised_from = binding.initialised.ctypes.data, base - binding.offset
        if self.native.count:
            for k in (0, 1):
                self.maps[slot, k] = np.zeros((length + 7) // 8, np.uint8)
                self.native.touched[slot][k] = self.maps[slot, k].ctypes.data

    def report(self) -> Report:
        """Read the results of the launch."""
        n = self.native
        counters = Counters(n.barriers, n.collectives[0], n.collectives[1], n.collectives[2])
        if n.count:
            for slot, k in self.maps:
                total, distinct = (
                    (counters.written, counters.written_distinct) if k else (counters.read, counters.read_distinct)
                )
                total[slot] = n.bytes[slot][k]
                distinct[slot] = (
                    int(np.bitwise_count(self.maps[slot, k]).sum())
                    if hasattr(np, "bitwise_count")
                    else int(np.unpackbits(self.maps[slot, k]).sum())
                )
        records = list(self.findings[: n.findings])
        places = self.image.lines(
            [pc for f in records for pc in (f.pc, f.other_pc) if pc > n.image_start], self.kernel.library.files
        )
        return Report(self.kernel.name, [self._finding(f, places) for f in records], counters, n.total - n.findings)

    def _finding(self, f: FindingRecord, places: Mapping[int, tuple[str, int]]) -> Finding:
        kind, text = KINDS[f.kind]
        unit = self.kernel.library.unit
        source = unit.instances[self.kernel.name].kernel
        file, line = places.get(f.pc, ("", 0))
        if f.line and not (
            line and f.file and Path(ctypes.string_at(f.file).decode()).name not in self.kernel.library.files
        ):
            file, line = Path(ctypes.string_at(f.file).decode()).name if f.file else source.file, f.line
        other_line = f.other_line or places.get(f.other_pc, ("", 0))[1]
        buffer, name, label, where = None, "", "", ""
        if f.slot < MAX_BUFFERS:
            buffer = f.slot
            name = next((a.name for a in self.kernel.arguments if a.kind == "buffer" and a.index == buffer), "")
            label = self.bindings[buffer].label if buffer in self.bindings else ""
            where = f" of {name} [[buffer({buffer})]]" + (f" ({label})" if label else "")
        elif 0x100 <= f.slot < 0x200:
            name = next((v.name for v in source.threadgroup if v.number == f.slot - 0x100), "")
            where = f" of threadgroup variable {name}"
        elif 0x200 <= f.slot < 0x300:
            name = next(
                (a.name for a in self.kernel.arguments if a.kind == "threadgroup" and a.index == f.slot - 0x200), ""
            )
            where = f" of {name} [[threadgroup({f.slot - 0x200})]]"
        group = self._group(f.group)
        thread = self._thread(f.tid, group)
        other_group = None if f.other_tid == 0xFFFFFFFF else self._group(f.other_group)
        other = None if other_group is None else self._thread(f.other_tid, other_group)
        offset = f.offset - (1 << 64) if f.offset >> 63 else f.offset
        body = text.format(
            at=f"{f.size} bytes at offset {offset}{where}",
            of=where,
            size=f.size,
            offset=offset,
            other=other,
            group=other_group,
            other_line=other_line,
            this="writes" if f.detail & 2 else "reads",
            that="wrote" if f.detail & 8 else "read",
        )
        at = f"{Path(file).name}:{line}" if line else "line unknown"
        again = f" (and {f.count - 1} more times)" if f.count > 1 else ""
        also = f"; the other access is in line {other_line}" if f.other_pc and other_line else ""
        who = f"thread {thread} of threadgroup {group}"
        message = f"{at}: {kind}: kernel {self.kernel.name}, {who} {body}{also}{again}"
        return Finding(
            kind,
            self.kernel.name,
            Path(file).name,
            line,
            buffer,
            name,
            label,
            offset,
            f.size,
            thread,
            group,
            other,
            other_group,
            other_line,
            f.count,
            message,
        )

    def _thread(self, tid: int, group: tuple[int, int, int]) -> tuple[int, int, int]:
        """A position from an index: threadgroups at the edge of the grid may be smaller."""
        threads, grid = self.record.threads, self.record.grid
        x, y, _ = (min(threads[k], grid[k] - group[k] * threads[k]) for k in range(3))
        return tid % x, tid // x % y, tid // (x * y)

    def _group(self, index: int) -> tuple[int, int, int]:
        x, y, _ = self.record.groups
        return index % x, index // x % y, index // (x * y)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Image:
    """A loaded shared library: its file and the addresses it occupies."""

    path: str
    start: int
    end: int

    def lines(self, addresses: Sequence[int], files: frozenset[str]) -> dict[int, tuple[str, int]]:
        """Source places of code addresses: the innermost frame that lies in one of `files`."""
        wanted = sorted(set(addresses))
        return (
            dict(zip(wanted, _places(self.path, tuple(a - self.start - 1 for a in wanted), files), strict=True))
            if wanted
            else {}
        )


@cache
def image_of(address: int) -> Image:
    """The shared library that holds an address."""
    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if not dladdr(address, ctypes.addressof(info)):
        raise MslError("the kernel's shared library cannot be found in memory")
    path, base = os.fsdecode(info.name or b""), info.base or 0
    end = base
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            end = max(end, int(line.split("-")[1].split()[0], 16))
    return Image(path, base, end)


@cache
def _symbolizer() -> tuple[str, ...]:
    tool = shutil.which("addr2line")
    if tool:
        return (tool, "-a", "-i", "-e")
    for name in ["llvm-symbolizer", *(f"llvm-symbolizer-{v}" for v in range(25, 13, -1))]:
        tool = shutil.which(name)
        if tool:
            return (tool, "-a", "-i", "--output-style=GNU", "-f=none", "-e")
    return ()


@cache
def _places(path: str, offsets: tuple[int, ...], files: frozenset[str]) -> list[tuple[str, int]]:
    found = [("", 0)] * len(offsets)
    if not _symbolizer():
        return found
    args = [*_symbolizer(), path, *(hex(o) for o in offsets)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
    index = -1
    for line in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            index += 1
        elif 0 <= index < len(found) and not found[index][1]:
            m = re.match(r"(.*):(\d+)", line)
            if m and Path(m[1]).name in files:
                found[index] = (m[1], int(m[2]))
    return found
