"""Keeps plans and their programs: equal `GraphParams` reuse both, and a decode step only refills inputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minfer.graph.plan import Plan, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minfer.graph.allocate import Allocator
    from minfer.graph.assign import Device
    from minfer.graph.ir import Graph, GraphParams

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Compiled(Generic[P]):
    """A plan and one program for each of its splits."""

    plan: Plan
    programs: tuple[P, ...]


class GraphCache(Generic[P]):
    """Plans and programs by `GraphParams`, the least recently used dropped beyond `capacity`.

    `compile` turns a split of a plan into a program. Counters `built` and `reused` say what happened.
    """

    def __init__(
        self,
        build: Callable[[GraphParams], Graph],
        devices: Mapping[str, Device],
        allocator: Allocator,
        compile: Callable[[Plan, Any], P],
        capacity: int = 8,
    ) -> None:
        self.build = build
        self.devices = devices
        self.allocator = allocator
        self.compile = compile
        self.capacity = capacity
        self.built = 0
        self.reused = 0
        self._entries: OrderedDict[GraphParams, Compiled[P]] = OrderedDict()

    def get(self, params: GraphParams) -> Compiled[P]:
        """The compiled plan for `params`, made on first use. Raises what building, assigning and compiling raise."""
        if found := self._entries.get(params):
            self._entries.move_to_end(params)
            self.reused += 1
            return found
        while len(self._entries) >= self.capacity:
            _, oldest = self._entries.popitem(last=False)
            self.allocator.release(oldest.plan.slots)
        plan = make_plan(self.build, params, self.devices, self.allocator)
        try:
            entry = Compiled(plan, tuple(self.compile(plan, split) for split in plan.splits))
        except BaseException:
            self.allocator.release(plan.slots)
            raise
        self._entries[params] = entry
        self.built += 1
        return entry
