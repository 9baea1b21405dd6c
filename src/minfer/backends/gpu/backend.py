"""The GPU backend: memory, weights where they lie, KV regions, and programs of launches, over any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.backends.base import Backend, Bytes, Check, KvRegion, LaunchTime, Tensors
from minfer.backends.gpu.devices.base import Bound, Step
from minfer.backends.gpu.inputs import RowCheck, row_checks
from minfer.backends.gpu.launch import Launch, LaunchList, Ref, barriers, prove_ordered
from minfer.backends.gpu.lower import Context, Region, choose, lower, unsupported
from minfer.backends.gpu.lower.attention import parts_bytes
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


#: Largest `cases.error` of a product whose inputs are rounded to halves: 11 bits, so each is off by up to 1/2048 of
#: itself; the largest of some thousand sums, a gated one among them, stays below ten times that.
HALF_BOUND = 5e-3


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
        op = node.op
        if not isinstance(op, (ir.MatMul, ir.Project)):
            return f32
        kernel = choose.product(self.device.profile, node.n_elements // node.shape[0]).kernel
        return HALF_BOUND if kernel == "gemm_mma" else f32

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
        n = min(plan.params.n_tokens, choose.SPLIT_MAX_QUERIES)
        n_splits = choose.splits(self.device.profile, n, n_cells)
        ops = [node.op for node in plan.graph if node.device == self.name]
        each = [parts_bytes(op, n, n_splits) for op in ops if isinstance(op, ir.Attn)]
        return max(each, default=0)  # layers share it

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

    def lower(self, plan: Plan, split: Split) -> tuple[Context, list[Launch]]:
        """The launches of a split; takes no memory."""
        shapes = {i: Region(r.n_cells, r.n_values, r.row_bytes) for i, r in self.regions.items()}
        context = Context(plan, self.name, self.device.profile, shapes, self._values)
        launches = lower(context, split)
        self.lowered += 1
        return context, launches

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
        context, launches = self.lower(plan, split)
        for name, values in context.tables.items():
            if name not in self._tables:
                table = self._tables[name] = self.allocate(values.nbytes, f"table {name}")
                self.device.write(table.handle, 0, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        for name, nbytes in context.scratch.items():
            if name not in self._scratch or self._scratch[name].nbytes < nbytes:
                self._scratch[name] = self.allocate(nbytes, f"scratch {name}")
        pool = {slot.buffer: buffers(index) for (index, device), slot in plan.slots.items() if device == self.name}
        checks = row_checks(plan, split, shapes=context.regions, buffers=buffers)
        return GpuProgram(self, self._steps(launches, pool), checks)

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
    """The launches of a split with their buffers. Encoded directly the first time, recorded on the second run."""

    def __init__(self, backend: GpuBackend, steps: tuple[Step, ...], checks: tuple[RowCheck, ...]) -> None:
        self.backend = backend
        self.device = backend.device
        self.steps = steps
        self.checks = checks
        self._ran = False
        self._recording: Recording | None = None

    def run(self) -> None:
        if (profile := self.backend.profile) is None:
            self._check()
            self._submit()
            return
        name = self.backend.name
        with profile.measure(f"{name}: row checks"):
            self._check()
        with profile.measure(f"{name}: {'replay' if self._recording else 'encode'}"):
            self._submit()
        with profile.measure(f"{name}: wait"):
            self.device.synchronize()

    def _check(self) -> None:
        for check in self.checks:
            check()

    def _submit(self) -> None:
        if not self._ran:
            self.device.encode(self.steps)
            self._ran = True
            return
        if self._recording is None:
            self._recording = self.device.record(self.steps)
        self._recording.run()
