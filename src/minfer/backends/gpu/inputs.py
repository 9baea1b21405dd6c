"""Row numbers are checked on the host before anything is launched: a kernel neither checks nor drops a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.errors import RequestError
from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minfer.backends.gpu.lower import Region
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node
    from minfer.graph.plan import Plan

I32 = npt.NDArray[np.int32]

#: Positions are turned into f32 by the rope kernels.
MAX_POSITION = 1 << 24


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A test of input buffers' values, run before each launch of a program."""

    node: str
    buffers: tuple[Any, ...]
    test: Callable[..., None]

    def __call__(self) -> None:
        if any(buffer.computed for buffer in self.buffers):
            return
        values = [buffer.host for buffer in self.buffers]
        if any(value is None for value in values):
            raise RequestError(f"{self.node}: its row numbers were never written by the host")
        self.test(self.node, *values)


def row_checks(
    plan: Plan, split: Split, *, shapes: Mapping[int, Region], buffers: Callable[[int], Any]
) -> tuple[RowCheck, ...]:
    """One check for each distinct input and limit; layers of equal regions share theirs."""
    found: dict[tuple[Any, ...], RowCheck] = {}

    def add(node: Node, sources: tuple[int, ...], key: tuple[Any, ...], test: Callable[..., None]) -> None:
        found.setdefault((sources, *key), RowCheck(node.name, tuple(map(buffers, sources)), test))

    for node in split.nodes:
        op = node.op
        if isinstance(op, ir.Embed):
            add(node, (node.inputs[0],), ("ids", op.weight.shape[1]), _ids(op.weight.shape[1], op.weight.name))
        elif isinstance(op, ir.GetRows):
            n = plan.graph.nodes[node.inputs[0]].shape[1]
            add(node, (node.inputs[1],), ("rows", n), _ids(n, plan.graph.nodes[node.inputs[0]].name))
        elif isinstance(op, (ir.KvStore, ir.HeadRopeStore)):
            cells = shapes[op.layer].n_cells
            add(node, (node.inputs[2],), ("cells", cells), _cells(op.layer, cells))
        if isinstance(op, (ir.Rope, ir.HeadRopeStore)):
            add(node, (node.inputs[1],), ("positions",), _positions)
        if isinstance(op, ir.Attn):
            cells = shapes[op.layer].n_cells
            add(node, (node.inputs[1], node.inputs[2]), ("window", cells), _window(op.layer, cells))
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Windows:
    """The inputs that say how many rows the queries of a program read."""

    buffers: tuple[tuple[Any, Any], ...]  # positions and window of each attention, as far as they differ

    def rows(self, most: int) -> int:
        """The most rows in a query's window; `most` where the host did not write all of them, or nothing is read."""
        found = 1
        for positions, window in self.buffers:
            if positions.host is None or window.host is None:
                return most
            found = max(found, _longest(positions.host, window.host))
        return found if self.buffers else most


def windows(plan: Plan, split: Split, buffers: Callable[[int], Any]) -> Windows:
    inputs = {(node.inputs[1], node.inputs[2]) for node in split.nodes if isinstance(node.op, ir.Attn)}
    return Windows(tuple((buffers(positions), buffers(window)) for positions, window in sorted(inputs)))


def _longest(positions: I32, window: I32) -> int:
    n = len(positions)
    if not len(window):
        return int(positions.max(initial=0)) + 1
    if len(window) == 2 * n:
        spans = window.reshape(-1, 2)
        return int((spans[:, 1] - spans[:, 0]).max(initial=1))
    return int(window.reshape(n, -1, 2)[:, :, 1].sum(axis=1).max(initial=1))


def _ids(n: int, what: str) -> Callable[[str, I32], None]:
    def test(node: str, ids: I32) -> None:
        if len(ids) and not (ids.min() >= 0 and ids.max() < n):
            raise RequestError(f"{node}: token ids {ids.min()} to {ids.max()} do not fit the {n} rows of {what}")

    return test


def _cells(layer: int, n_cells: int) -> Callable[[str, I32], None]:
    def test(node: str, cells: I32) -> None:
        if len(cells) and not (cells.min() >= 0 and cells.max() < n_cells):
            raise RequestError(
                f"{node}: layer {layer}: cells {cells.min()} to {cells.max()} do not fit a KV region of {n_cells}"
            )
        if len(np.unique(cells)) != len(cells):
            raise RequestError(f"{node}: layer {layer}: a cell is stored twice in one step")

    return test


def _positions(node: str, positions: I32) -> None:
    if len(positions) and not (positions.min() >= 0 and positions.max() < MAX_POSITION):
        raise RequestError(f"{node}: positions {positions.min()} to {positions.max()} are not in [0, {MAX_POSITION})")


def _window(layer: int, n_cells: int) -> Callable[[str, I32, I32], None]:
    def test(node: str, positions: I32, window: I32) -> None:
        n = len(positions)
        if not len(window):
            first, last = positions * 0, positions + 1
        elif len(window) == 2 * n:
            spans = window.reshape(-1, 2)
            spans = spans[spans[:, 0] < spans[:, 1]]
            first, last = spans[:, 0], spans[:, 1]
        else:
            runs = window.reshape(-1, 2)
            if runs[:, 1].min() < 0:
                raise RequestError(f"{node}: layer {layer}: a run of {runs[:, 1].min()} rows")
            runs = runs[runs[:, 1] > 0]
            first, last = runs[:, 0], runs[:, 0].astype(np.int64) + runs[:, 1]
        if len(first) and not (first.min() >= 0 and last.max() <= n_cells):
            low, high = first.min(), last.max() - 1
            raise RequestError(f"{node}: layer {layer}: a query reads cells {low} to {high} of {n_cells}")

    return test
