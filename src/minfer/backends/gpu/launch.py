"""Launches as data, the hazards between them, and the proof that an order respects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minfer.backends.gpu.args import STRUCTS
from minfer.errors import GraphError

Constant = int | float | bool
Access = Literal["read", "write", "both"]
Space = Literal["pool", "weight", "k", "v", "table", "scratch"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Memory by meaning, resolved to a device buffer when a program is made.

    `pool` is a buffer of the allocator (its number), `weight` a tensor (its name), `k` and `v` the KV rows of a layer,
    `table` a constant made at lowering (its name), `scratch` what lives within one program.
    """

    space: Space
    key: int | str

    def __str__(self) -> str:
        return f"{self.space}:{self.key}"


@dataclass(frozen=True, slots=True)
class Binding:
    """A buffer at a slot: the bytes `[start, end)` of it are all that the launch touches, and how."""

    slot: int
    ref: Ref
    start: int
    end: int
    access: Access = "read"

    @property
    def writes(self) -> bool:
        return self.access != "read"

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `grid` threadgroups of `threads` threads. `bytes` and `flops` are what it must move and do."""

    node: str
    family: str
    kernel: str
    constants: tuple[tuple[str, Constant], ...]
    struct: str
    args: bytes
    bindings: tuple[Binding, ...]
    grid: tuple[int, int, int]
    threads: int
    bytes: int
    flops: int

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "kernel": self.kernel,
            "constants": dict(self.constants),
            "args": {self.struct: STRUCTS[self.struct].unpack(self.args)},
            "bindings": [
                {"slot": b.slot, "buffer": str(b.ref), "start": b.start, "end": b.end, "access": b.access}
                for b in self.bindings
            ],
            "grid": list(self.grid),
            "threads": self.threads,
            "bytes": self.bytes,
            "flops": self.flops,
        }


def conflict(a: Launch, b: Launch) -> bool:
    """Whether the two touch a byte in common that one of them writes (RAW, WAR or WAW)."""
    return any(
        x.ref == y.ref and (x.writes or y.writes) and x.start < y.end and y.start < x.end
        for x in a.bindings
        for y in b.bindings
    )


def hazards(launches: Sequence[Launch]) -> tuple[tuple[int, ...], ...]:
    """For each launch, the earlier ones that it must wait for. Those implied by others are left out."""
    edges: list[tuple[int, ...]] = []
    before: list[set[int]] = []  # everything that a launch waits for, at any distance
    for i, launch in enumerate(launches):
        reached: set[int] = set()
        direct = []
        for j in range(i - 1, -1, -1):
            if j not in reached and conflict(launches[j], launch):
                direct.append(j)
                reached |= before[j] | {j}
        edges.append(tuple(sorted(direct)))
        before.append(reached)
    return tuple(edges)


def barriers(launches: Sequence[Launch]) -> tuple[bool, ...]:
    """Where a full barrier must stand: before a launch that conflicts with one since the last barrier."""
    out: list[bool] = []
    touched: dict[Ref, list[tuple[int, int, bool]]] = {}
    for launch in launches:
        clash = any(
            (b.writes or wrote) and b.start < end and start < b.end
            for b in launch.bindings
            for start, end, wrote in touched.get(b.ref, ())
        )
        if clash:
            touched = {}
        out.append(clash)
        for b in launch.bindings:
            touched.setdefault(b.ref, []).append((b.start, b.end, b.writes))
    return tuple(out)


def prove_ordered(launches: Sequence[Launch], fences: Sequence[bool]) -> None:
    """Check, pair by pair, that conflicting launches have a barrier between. Raises `GraphError` naming a pair."""
    epoch, epochs = 0, []
    for fence in fences:
        epoch += fence
        epochs.append(epoch)
    for i, launch in enumerate(launches):
        for j in range(i):
            if epochs[j] == epochs[i] and conflict(launches[j], launch):
                raise GraphError(
                    f"{launches[j].node} ({launches[j].kernel}) and {launch.node} ({launch.kernel}) touch the same "
                    "bytes, one of them writes, and no barrier is between"
                )


def summary(launches: Sequence[Launch]) -> Mapping[str, int]:
    """Totals of a plan: launches, barriers, bytes and flops."""
    return {
        "launches": len(launches),
        "barriers": sum(barriers(launches)),
        "bytes": sum(launch.bytes for launch in launches),
        "flops": sum(launch.flops for launch in launches),
    }


def table(launches: Sequence[Launch]) -> str:
    """The launches as text, a line each; `|` marks a barrier before."""
    fences = barriers(launches)
    rows = [("", "node", "kernel", "constants", "grid", "threads", "bytes", "flops")]
    for launch, fence in zip(launches, fences, strict=True):
        constants = " ".join(f"{name}={value}" for name, value in launch.constants)
        grid = "x".join(map(str, launch.grid))
        numbers = (str(launch.threads), f"{launch.bytes:,}", f"{launch.flops:,}")
        rows.append(("|" if fence else "", launch.node, launch.kernel, constants, grid, *numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = summary(launches)
    lines.append("")
    lines.append(
        f"{total['launches']} launches, {total['barriers']} barriers, {total['bytes']:,} bytes, {total['flops']:,} flops"
    )
    return "\n".join(lines)
