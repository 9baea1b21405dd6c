"""A case on a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.graph import ir
from minfer.graph.allocate import Allocator
from minfer.graph.plan import make_plan
from minfer.quants import KV_FORMATS

if TYPE_CHECKING:
    from minfer.cases.case import Array, Bytes, Case
    from minfer.graph.ir import Node


class Opened:
    """A case on a backend made for its KV format: planned, with weights and KV rows; run any number of times."""

    def __init__(self, case: Case, backend: Any, seed: int = 0) -> None:
        self._case, self._backend = case, backend
        self._region = None
        if case.kv:
            self._region = backend.add_kv_region(0, case.kv.n_cells, case.kv.n_values, KV_FORMATS[case.kv.format])
        backend.load_weights(case.weights(seed), ir.weights_of(case.op))
        self._allocator = Allocator({backend.name: backend})
        graph = case.graph(backend.name)
        self.plan = make_plan(lambda _: graph, graph.params, {backend.name: backend}, self._allocator)
        for node in self.plan.graph:
            assert node.device == backend.name, f"{case.name}: {node.name} is not on {backend.name}"

    @property
    def out(self) -> Node:
        return self.plan.graph.by_name["blk.0.out"]

    def _buffer(self, node: Node) -> Any:
        return self._allocator.buffer(self.plan.slots[node.index, self._backend.name])

    def launches(self) -> list[Any]:
        """What each split would launch, or None for each where the device runs no kernels of ours."""
        return [self._backend.launches(self.plan, split) for split in self.plan.splits]

    def compile(self) -> list[Any]:
        """The programs of the case."""
        nodes = self.plan.graph.nodes
        return [self._backend.compile(self.plan, s, lambda i: self._buffer(nodes[i])) for s in self.plan.splits]

    def write(self, seed: int = 0) -> None:
        """Write the inputs. The value and the rows of a run before are gone: what is read next is the next run's."""
        if self.out.dtype != "none":
            self._backend.write(self._buffer(self.out), np.full(self.out.n_elements, np.nan, np.float32))
        if self._region:
            for side in (self._region.k, self._region.v):
                self._backend.write(side, np.zeros(self._region.n_cells * self._region.row_bytes, np.uint8))
        arrays = self._case.data(seed)
        for node in self.plan.graph:
            if isinstance(node.op, ir.Input):
                self._backend.write(self._buffer(node), arrays[node.op.kind])

    def results(self) -> list[Array]:
        """The op's value (the parts of a `TopK`), and the KV rows that it stored; numpy shape."""
        case, out, found = self._case, self.out, []
        if out.dtype != "none":
            raw: Bytes = self._backend.read(self._buffer(out), out.nbytes)
            words = raw.view(np.int32).reshape(out.shape[::-1])
            if isinstance(case.op, ir.TopK):
                ids, *parts = np.split(words, (case.op.k, -1), -1)
                found += [ids, *(part.view(np.float32) for part in parts)]
            else:
                found.append(words.view(np.float32))
        if case.kv and self._region is not None and not isinstance(case.op, ir.Attn):
            region, fmt = self._region, KV_FORMATS[case.kv.format]
            for side in (region.k, region.v):
                raw = self._backend.read(side, region.n_cells * region.row_bytes)
                found.append(fmt.unpack(raw.reshape(region.n_cells, region.row_bytes), region.n_values))
        return found

    def close(self) -> None:
        self._allocator.close()


def run(case: Case, backend: Any, seed: int = 0) -> list[Array]:
    """Run a case on a backend made for its KV format: the op's value (or the KV rows), numpy shape."""
    opened = Opened(case, backend, seed)
    programs = opened.compile()
    opened.write(seed)
    for program in programs:
        program.run()
    results = opened.results()
    opened.close()
    return results
