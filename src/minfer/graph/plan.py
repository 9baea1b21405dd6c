"""A plan: what runs where, in which order, over which buffers. Printed, compared and kept as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minfer.graph.allocate import Allocator, Slot, Split, splits_of
from minfer.graph.assign import Device, assign
from minfer.graph.fuse import fuse
from minfer.graph.ir import Graph, GraphParams, Input, Node, Weight, describe
from minfer.quants import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Plan:
    """A fused and placed graph, its splits, the slot of every value, and how often each fusion fired."""

    graph: Graph
    splits: tuple[Split, ...]
    slots: Mapping[tuple[int, str], Slot]
    fused: Mapping[str, int]

    @property
    def params(self) -> GraphParams:
        return self.graph.params

    def slot(self, node: Node) -> Slot:
        return self.slots[node.index, node.device]

    @cached_property
    def inputs(self) -> tuple[tuple[int, str, str], ...]:
        """(node, device, kind) of every input, once for each device that reads it."""
        nodes = self.graph.nodes
        return tuple((i, device, op.kind) for i, device in self.slots if isinstance(op := nodes[i].op, Input))

    @property
    def pool_bytes(self) -> int:
        return sum({slot.buffer: slot.nbytes for slot in self.slots.values()}.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the plan reads, each once."""
        return sum(map(weight_bytes, {weight for node in self.graph for weight in node.weights}))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `minfer plan --json`, golden files and the view; equal plans give equal data."""
        params = describe(self.params)
        params["unfused"] = sorted(self.params.unfused)
        numbers = self._numbers()
        nodes = []
        for node in self.graph:
            slot = self.slots.get((node.index, node.device))
            nodes.append(
                {
                    "index": node.index,
                    "name": node.name,
                    "op": node.kind,
                    "fields": describe(node.op),
                    "inputs": list(node.inputs),
                    "shape": list(node.shape),
                    "dtype": node.dtype,
                    "device": node.device,
                    "buffer": numbers[slot.buffer] if slot else None,
                    "bytes": node.nbytes,
                    "weight_bytes": sum(map(weight_bytes, node.weights)),
                }
            )
        sizes = {numbers[s.buffer]: {"device": s.device, "bytes": s.nbytes} for s in self.slots.values()}
        return {
            "params": params,
            "nodes": nodes,
            "outputs": list(self.graph.outputs),
            "splits": [
                {"device": s.device, "nodes": [n.index for n in s.nodes], "receives": list(s.receives)}
                for s in self.splits
            ],
            "buffers": [{"index": i, **sizes[i]} for i in sorted(sizes)],
            "fused": dict(self.fused),
        }

    def table(self) -> str:
        """The plan as a text table, a line a node."""
        numbers = self._numbers()
        rows = [("", "node", "op", "reads", "shape", "device", "buf", "bytes", "weights")]
        for node in self.graph:
            slot = self.slots.get((node.index, node.device))
            read = " ".join(f"{w.name.removeprefix(f'blk.{node.layer}.')}:{w.type}" for w in node.weights)
            rows.append(
                (
                    str(node.index),
                    node.name,
                    node.kind,
                    ",".join(map(str, node.inputs)),
                    "x".join(map(str, node.shape)),
                    node.device,
                    str(numbers[slot.buffer]) if slot else "",
                    f"{node.nbytes:,}",
                    f"{sum(map(weight_bytes, node.weights)):,}  {read}" if read else "",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows
        ]
        p = self.params
        fused = ", ".join(f"{name} x{count}" for name, count in self.fused.items() if count) or "none"
        lines += [
            "",
            f"{p.n_tokens} tokens, {p.n_outputs} outputs, window layout {p.window}, KV {p.kv_format}",
            f"{len(self.splits)} splits, {sum(len(s.nodes) for s in self.splits)} nodes; fused: {fused}",
            f"{len(set(numbers.values()))} buffers, {self.pool_bytes:,} bytes; weights {self.weight_bytes:,} bytes",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _numbers(self) -> dict[int, int]:
        """Pool buffers numbered by first use in this plan, so that a plan does not depend on the plans before it."""
        order: dict[int, int] = {}
        for node in self.graph:
            for (index, _), slot in self.slots.items():
                if index == node.index:
                    order.setdefault(slot.buffer, len(order))
        return order


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight as it lies in the file."""
    rows = 1
    for extent in weight.shape[1:]:
        rows *= extent
    return rows * FORMATS[weight.type].row_bytes(weight.shape[0])


def make_plan(
    build: Callable[[GraphParams], Graph],
    params: GraphParams,
    devices: Mapping[str, Device],
    allocator: Allocator,
) -> Plan:
    """build, assign, fuse, allocate."""
    graph, fired = fuse(assign(build(params), devices), devices)
    splits = splits_of(graph)
    return Plan(graph, splits, allocator.place(graph, splits), fired)
