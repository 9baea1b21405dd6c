"""Splits and buffers: which nodes run together, and where every value lives.

A split is a run of nodes on one device; it finishes before a value leaves it. The allocator owns every buffer of every
plan and the KV regions, so plans of one model share them: only one plan runs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minfer.graph.ir import Graph, Node

#: Elementwise ops read and write one index at a time, so the result may take the place of these inputs.
IN_PLACE: Mapping[type[ir.Op], tuple[int, ...]] = {
    ir.Silu: (0,),
    ir.Gelu: (0,),
    ir.Scale: (0,),
    ir.SoftCap: (0,),
    ir.Add: (0, 1),
    ir.Mul: (0, 1),
    ir.SwiGLU: (0, 1),
    ir.GeGLU: (0, 1),
    ir.Project: (1,),  # the value an `add` epilogue adds
}


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes that run on one device without a pause; `receives` are values copied in from other devices first."""

    device: str
    nodes: tuple[Node, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value lives on a device: a pool buffer of the allocator, from its first byte."""

    device: str
    buffer: int
    nbytes: int


class Memory(Protocol):
    """What the allocator asks of a backend."""

    def allocate(self, nbytes: int, label: str) -> Any:
        """A zeroed buffer; its contents are not to be relied on once it was recycled."""

    def free(self, buffer: Any) -> None: ...


def splits_of(graph: Graph) -> tuple[Split, ...]:
    """Cut the graph, inputs aside, into runs of nodes on one device, in build order."""
    runs: list[list[Node]] = []
    for node in graph:
        if isinstance(node.op, ir.Input):
            continue
        if not runs or runs[-1][0].device != node.device:
            runs.append([])
        runs[-1].append(node)
    splits = []
    arrived: set[tuple[int, str]] = set()
    for run in runs:
        device = run[0].device
        receives = []
        for source in dict.fromkeys(i for node in run for i in node.inputs):
            other = graph.nodes[source]
            if isinstance(other.op, ir.Input) or other.device == device or (source, device) in arrived:
                continue
            arrived.add((source, device))
            receives.append(source)
        splits.append(Split(device, tuple(run), tuple(receives)))
    return tuple(splits)


@dataclass(slots=True)
class _Pooled:
    device: str
    nbytes: int
    users: int = 0
    memory: Any = None


@dataclass(slots=True)
class Allocator:
    """Every buffer of an engine. Buffers are reused by exact size; `buffer` makes the real memory on first use."""

    devices: Mapping[str, Memory]
    pool: dict[int, _Pooled] = field(default_factory=dict)
    _next: int = 0

    def place(self, graph: Graph, splits: tuple[Split, ...]) -> dict[tuple[int, str], Slot]:
        """A slot for each value on each device that holds it, keyed by (node index, device).

        Inputs, outputs and values that crossed from another device stay for the whole run, as does everything in a
        traced graph; any other buffer is free again after its last reader.
        """
        trace = graph.params.trace
        slots: dict[tuple[int, str], Slot] = {}
        taken: set[int] = set()
        free: dict[tuple[str, int], list[int]] = {}
        for number, entry in self.pool.items():
            free.setdefault((entry.device, entry.nbytes), []).append(number)

        def take(index: int, device: str, nbytes: int) -> None:
            ready = free.get((device, nbytes))
            number = ready.pop() if ready else self._grow(device, nbytes)
            taken.add(number)
            slots[index, device] = Slot(device, number, nbytes)

        pinned = set(graph.outputs)
        for node in graph:
            users = graph.consumers[node.index]
            homes = dict.fromkeys(graph.nodes[user].device for user in users)
            if isinstance(node.op, ir.Input):
                for device in homes or {node.device: None}:
                    take(node.index, device, node.nbytes)
        for split in splits:
            for index in split.receives:
                take(index, split.device, graph.nodes[index].nbytes)
        for split in splits:
            for node in split.nodes:
                if node.dtype == "none":
                    continue
                dying = [
                    i
                    for i in dict.fromkeys(node.inputs)
                    if i not in pinned
                    and not trace
                    and not isinstance(graph.nodes[i].op, ir.Input)
                    and graph.nodes[i].device == node.device
                    and graph.consumers[i][-1] == node.index
                ]
                heir = _heir(graph, node, dying)
                if heir is not None:
                    slots[node.index, node.device] = slots[heir, node.device]
                    dying.remove(heir)
                else:
                    take(node.index, node.device, node.nbytes)
                for i in dying:
                    slot = slots[i, node.device]
                    free.setdefault((slot.device, slot.nbytes), []).append(slot.buffer)
        for number in taken:
            self.pool[number].users += 1
        return slots

    def release(self, slots: Mapping[tuple[int, str], Slot]) -> None:
        """A plan is gone: buffers that no other plan uses are freed."""
        for number in {slot.buffer for slot in slots.values()}:
            entry = self.pool[number]
            entry.users -= 1
            if entry.users == 0:
                if entry.memory is not None:
                    self.devices[entry.device].free(entry.memory)
                del self.pool[number]

    def buffer(self, slot: Slot) -> Any:
        """The backend's buffer behind a slot."""
        entry = self.pool[slot.buffer]
        if entry.memory is None:
            entry.memory = self.devices[entry.device].allocate(entry.nbytes, f"pool {slot.buffer}")
        return entry.memory

    def nbytes(self, device: str) -> int:
        """Bytes of the pool buffers on a device, real or not yet."""
        return sum(entry.nbytes for entry in self.pool.values() if entry.device == device)

    def close(self) -> None:
        for entry in self.pool.values():
            if entry.memory is not None:
                self.devices[entry.device].free(entry.memory)
        self.pool.clear()

    def _grow(self, device: str, nbytes: int) -> int:
        number = self._next
        self._next += 1
        self.pool[number] = _Pooled(device, nbytes)
        return number


def _heir(graph: Graph, node: Node, dying: list[int]) -> int | None:
    """The dying input whose buffer `node` may write over: same size, and read nowhere but index by index."""
    in_place = IN_PLACE.get(type(node.op), ())
    for which in in_place:
        source = node.inputs[which] if which < len(node.inputs) else None
        if source not in dying or graph.nodes[source].nbytes != node.nbytes:
            continue
        if all(position in in_place for position, i in enumerate(node.inputs) if i == source):
            return source
    return None


def lifetimes(graph: Graph) -> Iterator[tuple[Node, int, int]]:
    """(node, first, last) of every value: the indices of its maker and of its last reader, in execution order."""
    for node in graph:
        users = graph.consumers[node.index]
        yield node, node.index, max(users, default=node.index)
