"""Launches as data, the hazards between them, and the proof that an order respects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from minfer.backends.gpu.args import STRUCTS
from minfer.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Sequence

Constant = int | bool
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
    """One kernel launch: `grid` threadgroups of `threads` threads. `bytes` and `flops` are what it must move and do.

    `threadgroup_bytes` is the length of [[threadgroup(0)]] memory, which only kernels of extra tiers take: the others
    declare what they need.
    """

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
    threadgroup_bytes: int = 0

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
            "threadgroup_bytes": self.threadgroup_bytes,
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


@dataclass(frozen=True, slots=True)
class LaunchList:
    """The launches of a split, to be printed. `|` in the table marks a barrier before a launch."""

    launches: tuple[Launch, ...]

    def totals(self) -> dict[str, int]:
        return {
            "launches": len(self.launches),
            "barriers": sum(barriers(self.launches)),
            "bytes": sum(launch.bytes for launch in self.launches),
            "flops": sum(launch.flops for launch in self.launches),
        }

    def to_json(self) -> dict[str, Any]:
        fences = barriers(self.launches)
        edges = hazards(self.launches)
        listed = [
            {**launch.to_json(), "barrier": fence, "after": list(after)}
            for launch, fence, after in zip(self.launches, fences, edges, strict=True)
        ]
        return {"launches": listed, "totals": self.totals()}

    def table(self) -> str:
        rows = [("", "node", "kernel", "constants", "grid", "threads", "bytes", "flops")]
        for launch, fence in zip(self.launches, barriers(self.launches), strict=True):
            constants = " ".join(f"{name}={value:d}" for name, value in launch.constants)
            numbers = (str(launch.threads), f"{launch.bytes:,}", f"{launch.flops:,}")
            grid = "x".join(map(str, launch.grid))
            rows.append(("|" if fence else "", launch.node, launch.kernel, constants, grid, *numbers))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", ", ".join(f"{count:,} {name}" for name, count in self.totals().items())])
