"""The GPU backend: memory, weights where they lie, KV regions, and programs of launches, over any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.backends.base import Backend, Bytes, Check, KvRegion, LaunchTime, Tensors
from minfer.backends.gpu.devices.base import Bound, Step
from minfer.backends.gpu.inputs import RowCheck, Windows, row_checks, windows
from minfer.backends.gpu.launch import Launch, LaunchList, Ref, barriers, prove_ordered
from minfer.backends.gpu.lower import Context, Region, choose, lower, unsupported
from minfer.backends.gpu.lower.attention import parts_bytes
from minfer.backends.gpu.lower.project import rounded_bytes
from minfer.backends.gpu.lower.simple import move_rows
from minfer.backends.gpu.weights import register
from minfer.errors import NumericsError, RequestError
from minfer.graph import ir
from minfer.quants import FORMATS
from minfer.quants import kv_format as parse_kv_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from minfer.backends.base import LaunchList as Listed
    from minfer.backends.base import Program, Progress
    from minfer.backends.gpu.devices.base import Device, Recording
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan


#: Largest `cases.error` of a product whose inputs and weights are rounded to halves: 11 bits, so each is off by up to
#: 1/2048 of itself; the largest of some thousand sums stays below sixteen times that. So it is in attention by tensor
#: cores, where queries, weights and (to tf32, 11 bits as well) keys and values are rounded.
HALF_BOUND = 8e-3
#: The same of a gated product, where the largest of two sums meet: few results are many times the root mean square.
GATED_BOUND = 2 * HALF_BOUND


@dataclass(slots=True)
class Memory:
    """A buffer of the device. `host` is the last array of integers written to it: rows are checked there. `computed`
    integers came from a kernel, whose indices are in range."""

    handle: Any
    nbytes: int
    label: str
    host: npt.NDArray[np.int32] | None = None
    computed: bool = False


class GpuBackend(Backend):
    """Runs splits on a device; `lowered` counts the splits that were turned into launches."""

    def __init__(self, device: Device, kv_format: str = "f32", name: str | None = None) -> None:
        self.device = device
        self.name = name or device.profile.name
        self.caveat = device.caveat
        self.runs_ahead = device.runs_ahead
        self.chains = device.chains
        self.kv_format = parse_kv_format(kv_format)
        self.regions: dict[int, KvRegion] = {}
        self.lowered = 0
        self._tensors: Tensors | None = None
        self._weights: dict[str, tuple[Any, int]] = {}
        self._tables: dict[str, Memory] = {}
        self._scratch: dict[str, Memory] = {}

    def supports(self, node: Node) -> str | None:
        return unsupported(node, self.device.profile, self.kv_format.name)

    def bound(self, node: Node, kind: str, f32: float) -> float:
        op, profile = node.op, self.device.profile
        if isinstance(op, ir.Attn):  # a node does not know its window: causal ones are tiled first
            return HALF_BOUND if choose.attention_mma(profile, node.shape[1], 0) else f32
        if not isinstance(op, (ir.MatMul, ir.Project)):
            return f32
        kernel = choose.product(profile, node.n_elements // node.shape[0]).kernel
        if kernel != "gemm_mma":
            return f32
        return GATED_BOUND if isinstance(op, ir.Project) and op.epilogue in ("swiglu", "geglu") else HALF_BOUND

    def facts(self) -> dict[str, str]:
        return self.device.facts()

    def checks(self, *, risky: bool) -> Iterator[Check]:
        return self.device.checks(risky=risky)

    # --- memory --------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, label: str) -> Memory:
        return Memory(self.device.buffer(nbytes, label), nbytes, label)

    def free(self, buffer: Memory) -> None:
        buffer.handle = buffer.host = None

    def write(self, buffer: Memory, data: npt.NDArray[Any]) -> None:
        raw = np.ascontiguousarray(data)
        buffer.host, buffer.computed = raw.copy() if raw.dtype == np.int32 else None, False
        if raw.nbytes:
            self.device.write(buffer.handle, 0, raw.reshape(-1).view(np.uint8).data)

    def read(self, buffer: Memory, nbytes: int) -> Bytes:
        self.device.synchronize()
        return np.frombuffer(self.device.read(buffer.handle, 0, nbytes), np.uint8).copy()

    def fetch(self, buffer: Memory, nbytes: int) -> Callable[[], Bytes]:
        fetched = self.device.fetch(buffer.handle, 0, nbytes)
        return lambda: np.frombuffer(fetched(), np.uint8)

    def copy(self, source: Memory, target: Memory, nbytes: int) -> None:
        self.device.copy(source.handle, 0, target.handle, 0, nbytes)
        target.host, target.computed = None, True

    def memory(self) -> tuple[int, int] | None:
        return self.device.memory()

    def synchronize(self) -> None:
        self.device.synchronize()

    # --- weights and KV rows -------------------------------------------------------------------------------------

    def load_weights(self, tensors: Tensors, weights: Sequence[Weight], progress: Progress | None = None) -> None:
        self._tensors = tensors
        self._weights = register(self.device, tensors, weights, progress)

    def weight_bytes(self, weight: Weight) -> int:
        if self.device.profile.unified_memory:
            return 0
        return math.prod(weight.shape[1:]) * FORMATS[weight.type].row_bytes(weight.shape[0])

    def scratch_bytes(self, plan: Plan, n_cells: int) -> int:
        n = plan.params.n_tokens
        few = min(n, choose.SPLIT_MAX_QUERIES)
        n_splits = choose.splits(self.device.profile, few, n_cells)
        parts = halves = 0  # layers share them
        for node in plan.graph:
            op = node.op
            if node.device != self.name:
                continue
            if isinstance(op, ir.Attn):
                parts = max(parts, parts_bytes(op, few, n_splits))
            elif isinstance(op, (ir.MatMul, ir.Project)):
                x = plan.graph.nodes[node.inputs[0]]
                tokens = x.n_elements // x.shape[0]
                if choose.product(self.device.profile, tokens).tier == "mma":
                    halves = max(halves, sum(rounded_bytes(x.shape[0], tokens)))
        return parts + halves

    def copy_rows(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """One launch a move and side, on the device; a move may overlap itself in either direction."""
        for region in self.regions.values():
            for source, target, count in moves:
                if min(source, target, count) < 0 or max(source, target) + count > region.n_cells:
                    raise RequestError(
                        f"layer {region.layer}: moving {count} rows from cell {source} to {target} leaves the "
                        f"{region.n_cells} cells of the region"
                    )
        launches = [
            move_rows(Ref(side, layer), region.row_bytes, source, target, count)
            for source, target, count in moves
            if count and source != target
            for layer, region in self.regions.items()
            for side in ("k", "v")
        ]
        if launches:
            self.device.encode(self._steps(launches, {}))

    # --- programs ------------------------------------------------------------------------------------------------

    def lower(self, plan: Plan, split: Split, rows: int | None = None) -> tuple[Context, list[Launch]]:
        """The launches of a split, for windows of up to `rows` rows where that is known; takes no memory."""
        context = Context(plan, self.name, self.device.profile, self._shapes(), self._values, rows)
        launches = lower(context, split)
        self.lowered += 1
        return context, launches

    def _shapes(self) -> dict[int, Region]:
        return {i: Region(r.n_cells, r.n_values, r.row_bytes) for i, r in self.regions.items()}

    def launches(self, plan: Plan, split: Split) -> LaunchList:
        return LaunchList(tuple(self.lower(plan, split)[1]))

    def prepare(self, listed: Iterable[Listed]) -> int:
        launches = [launch for some in listed if isinstance(some, LaunchList) for launch in some.launches]
        return self.device.prepare(launches)

    def launch_times(self, program: Program) -> list[LaunchTime]:
        assert isinstance(program, GpuProgram)
        launches = [step.launch for step in program.steps]
        return [
            LaunchTime(launch.node, launch.kernel, seconds)
            for launch, seconds in zip(launches, self.device.times(program.steps), strict=True)
        ]

    def compile(self, plan: Plan, split: Split, buffers: Callable[[int], Memory]) -> GpuProgram:
        n, n_cells = plan.params.n_tokens, max((region.n_cells for region in self.regions.values()), default=0)
        pool = {slot.buffer: buffers(index) for (index, device), slot in plan.slots.items() if device == self.name}

        def bucket(rows: int) -> int:
            return choose.bucket(self.device.profile, n, rows, n_cells)

        def steps(rows: int) -> tuple[Step, ...]:
            context, launches = self.lower(plan, split, rows or None)
            for name, values in context.tables.items():
                if name not in self._tables:
                    table = self._tables[name] = self.allocate(values.nbytes, f"table {name}")
                    self.device.write(table.handle, 0, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            for name, nbytes in context.scratch.items():
                if name not in self._scratch or self._scratch[name].nbytes < nbytes:
                    self._scratch[name] = self.allocate(nbytes, f"scratch {name}")
            return self._steps(launches, pool)

        checks = row_checks(plan, split, shapes=self._shapes(), buffers=buffers)
        return GpuProgram(self, steps, bucket, windows(plan, split, buffers), checks)

    def _steps(self, launches: Sequence[Launch], pool: Mapping[int, Memory]) -> tuple[Step, ...]:
        """Launches with their buffers and barriers; `pool` holds the allocator's buffers by number."""
        fences = barriers(launches)
        prove_ordered(launches, fences)

        def resolve(ref: Ref) -> tuple[Any, int]:
            if ref.space == "pool":
                return pool[int(ref.key)].handle, 0
            if ref.space == "weight":
                return self._weights[str(ref.key)]
            if ref.space == "table":
                return self._tables[str(ref.key)].handle, 0
            if ref.space == "scratch":
                return self._scratch[str(ref.key)].handle, 0
            region = self.regions[int(ref.key)]
            return (region.k if ref.space == "k" else region.v).handle, 0

        steps = []
        for launch, fence in zip(launches, fences, strict=True):
            bound = []
            for b in launch.bindings:
                handle, offset = resolve(b.ref)
                bound.append(Bound(b.slot, handle, offset, b.start, b.end, b.access != "write", b.writes))
            steps.append(Step(launch, tuple(bound), fence))
        return tuple(steps)

    def _values(self, weight: Weight) -> npt.NDArray[np.float32]:
        if self._tensors is None:
            raise RequestError(f"{weight.name}: this backend has no weights loaded")
        values: npt.NDArray[np.float32] = FORMATS[weight.type].dequantize(self._tensors.data(weight.name)).reshape(-1)
        if not (np.isfinite(values).all() and values.all()):
            raise NumericsError(f"{weight.name}: a frequency factor is zero, NaN or Inf")
        return values

    def close(self) -> None:
        self.device.close()
        self._weights.clear()
        self._tables.clear()
        self._scratch.clear()
        self.regions.clear()
        self._tensors = None


class GpuProgram:
    """A split with its buffers: launches for each context bucket that was met, encoded directly the first time and
    recorded on the second run.

    `bucket` rounds up the rows that a window may have, `lower` makes launches for so many.
    """

    def __init__(
        self,
        backend: GpuBackend,
        lower: Callable[[int], tuple[Step, ...]],
        bucket: Callable[[int], int],
        windows: Windows,
        checks: tuple[RowCheck, ...],
    ) -> None:
        self.backend = backend
        self.device = backend.device
        self.checks = checks
        self._lower = lower
        self._bucket = bucket
        self._windows = windows
        most = bucket(choose.MANY)
        self._lists = {most: lower(most)}  # the most scratch memory, and what cannot be lowered, are known at once
        self._recordings: dict[int, Recording | None] = {}
        self._rows = most

    @property
    def steps(self) -> tuple[Step, ...]:
        """The launches of the last run."""
        return self._lists[self._rows]

    def run(self) -> None:
        if (profile := self.backend.profile) is None:
            self._prepare()
            self._submit()
            return
        name = self.backend.name
        with profile.measure(f"{name}: row checks"):
            self._prepare()
        with profile.measure(f"{name}: {'replay' if self._recordings.get(self._rows) else 'encode'}"):
            self._submit()
        with profile.measure(f"{name}: wait"):
            self.device.synchronize()

    def _prepare(self) -> None:
        for check in self.checks:
            check()
        self._rows = self._bucket(self._windows.rows(choose.MANY))
        if self._rows not in self._lists:
            self._lists[self._rows] = self._lower(self._rows)
            # Kernels of the longest windows too: growing into them is not to wait for a compiler.
            self.device.prepare([step.launch for steps in self._lists.values() for step in steps])

    def _submit(self) -> None:
        if self._rows not in self._recordings:
            self.device.encode(self.steps)
            self._recordings[self._rows] = None
            return
        recording = self._recordings[self._rows]
        if recording is None:
            recording = self._recordings[self._rows] = self.device.record(self.steps)
        recording.run()
