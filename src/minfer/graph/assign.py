"""Placement: every node gets the device of its layer, and a device that cannot run a node refuses it here, by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from minfer.errors import UnsupportedError
from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minfer.graph.ir import Graph, Node


class Device(Protocol):
    """What placement and fusion ask of a backend."""

    def supports(self, node: Node) -> str | None:
        """None if the device runs the node as it is, else what is missing (op, dtype, kernel, limit)."""


def assign(graph: Graph, devices: Mapping[str, Device]) -> Graph:
    """The graph with a device at every node.

    Inputs live where their first reader runs; the token embedding on `placement.embed`, a layer's nodes on the layer's
    device, the rest on `placement.output`.
    Raises `UnsupportedError` for an unknown device, and for a node that its device cannot run.
    """
    placement = graph.params.placement
    if unknown := [name for name in placement.devices if name not in devices]:
        raise UnsupportedError(f"no device named {', '.join(unknown)}; there are: {', '.join(devices)}")
    names: list[str] = []
    for node in graph:
        if node.layer is not None:
            if node.layer >= len(placement.layers):
                raise UnsupportedError(f"{node.name}: layer {node.layer} has no place among {len(placement.layers)}")
            names.append(placement.layers[node.layer])
        elif isinstance(node.op, ir.Embed):
            names.append(placement.embed)
        else:
            names.append(placement.output)
    for node in reversed(graph.nodes):
        # The embedding's scaling and the like stay beside it: no value crosses before the first layer.
        users = graph.consumers[node.index]
        if isinstance(node.op, ir.Input) and users:
            names[node.index] = names[users[0]]
    first_layer = next((n.index for n in graph if n.layer is not None), len(graph.nodes))
    for node in graph.nodes[:first_layer]:
        if not isinstance(node.op, ir.Input):
            names[node.index] = placement.embed
    placed = dataclasses.replace(graph, nodes=tuple(map(ir.Node.on, graph.nodes, names)))
    for node in placed:
        if isinstance(node.op, ir.Input):
            continue
        if (missing := devices[node.device].supports(node)) is not None:
            raise UnsupportedError(f"{node.name}: {node.kind} cannot run on {node.device}: {missing}")
    return placed
