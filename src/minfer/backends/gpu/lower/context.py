"""What lowering knows: the plan, the device's profile, the KV regions; and how a launch is written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minfer.backends.gpu.args import STRUCTS
from minfer.backends.gpu.launch import Binding, Constant, Launch, Ref
from minfer.quants import FORMATS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from minfer.backends.gpu.args import Field, Struct
    from minfer.backends.gpu.launch import Access
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 2}


@dataclass(frozen=True, slots=True)
class Profile:
    """A device as lowering sees it: its limits, what it prefers, and tiers that were switched off.

    `extra` names the tiers that only some devices take. Attention over more than `whole_rows` rows has a split for each
    `split_rows`, up to `max_splits`. `cores` counts the GPU's cores (streaming multiprocessors), where a grid depends
    on it.
    """

    name: str
    unified_memory: bool
    max_threads: int
    max_threadgroup_bytes: int
    max_buffer_bytes: int
    simd_matrix: bool = True
    off: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()
    whole_rows: int = 256
    split_rows: int = 256
    max_splits: int = 16
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """The shape of a layer's KV rows."""

    n_cells: int
    n_values: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.n_cells * self.row_bytes


@dataclass(slots=True)
class Context:
    """One split being lowered; collects the tables and the scratch memory that its launches need.

    `rows` is the most that a window may hold, where that is known to be less than the KV region has.
    """

    plan: Plan
    device: str
    profile: Profile
    regions: Mapping[int, Region]
    values: Callable[[Weight], npt.NDArray[np.float32]]  # a small weight as numbers, for tables
    rows: int | None = None
    tables: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)

    @property
    def kv_format(self) -> str:
        return self.plan.params.kv_format

    def inputs(self, node: Node) -> list[Node]:
        return [self.plan.graph.nodes[i] for i in node.inputs]

    def value(self, slot: int, node: Node, access: Access = "read") -> Binding:
        """A node's value; its size is the logical one."""
        return Binding(slot, self.value_ref(node), 0, node.nbytes, access)

    def value_ref(self, node: Node) -> Ref:
        return Ref("pool", self.plan.slots[node.index, self.device].buffer)

    def weight(self, slot: int, weight: Weight) -> Binding:
        return Binding(slot, Ref("weight", weight.name), 0, weight_bytes(weight))

    def kv(self, slot: int, side: str, layer: int, access: Access) -> Binding:
        return Binding(slot, Ref("k" if side == "k" else "v", layer), 0, self.regions[layer].nbytes, access)

    def table(self, slot: int, name: str, make: Callable[[], npt.NDArray[np.float32]]) -> Binding:
        """A constant array, made once for each name."""
        if name not in self.tables:
            self.tables[name] = make()
        return Binding(slot, Ref("table", name), 0, self.tables[name].nbytes)

    def temporary(self, slot: int, name: str, nbytes: int, access: Access) -> Binding:
        """Memory that lives within the program; equal names share it."""
        self.scratch[name] = max(nbytes, self.scratch.get(name, 0))
        return Binding(slot, Ref("scratch", name), 0, nbytes, access)


def launch(
    node: Node,
    family: str,
    kernel: str,
    struct: Struct,
    values: Mapping[str, Field],
    bindings: list[Binding],
    grid: tuple[int, int, int],
    threads: int,
    *,
    constants: Mapping[str, Constant] | None = None,
    nbytes: int | None = None,
    flops: int = 0,
    threadgroup_bytes: int = 0,
) -> Launch:
    """A launch. `nbytes` is what it must move where that is not simply all that it binds."""
    moved = sum(b.nbytes for b in bindings) if nbytes is None else nbytes
    assert STRUCTS[struct.name] is struct
    ordered = tuple(sorted(bindings, key=lambda b: b.slot))
    fixed = tuple((constants or {}).items())
    raw = struct.pack(**values)
    return Launch(
        node.name, family, kernel, fixed, struct.name, raw, ordered, grid, threads, moved, flops, threadgroup_bytes
    )


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight as it lies in the file."""
    return math.prod(weight.shape[1:]) * FORMATS[weight.type].row_bytes(weight.shape[0])


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


Lower = Callable[[Context, "Node", Any], list[Launch]]
