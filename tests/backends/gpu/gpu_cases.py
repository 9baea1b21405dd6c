"""Op cases on the simulator: their launches, and compiling the kernels of many cases together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from minfer import cases
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.graph import ir
from minfer.graph.allocate import Allocator
from minfer.graph.plan import make_plan
from minfer.quants import KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minfer.backends.gpu.launch import Launch
    from minfer.cases import Case

#: Kernel variants in one compilation: few enough that two processors share the work.
CHUNK = 20


def backend(case: Case, **options: object) -> GpuBackend:
    return GpuBackend(SimulatorDevice(**options), case.kv_format)  # type: ignore[arg-type]


def launches(case: Case) -> list[Launch]:
    """What the case would launch."""
    gpu = backend(case)
    if case.kv:
        gpu.add_kv_region(0, case.kv.n_cells, case.kv.n_values, KV_FORMATS[case.kv.format])
    graph = case.graph(gpu.name)
    gpu.load_weights(case.weights(), ir.weights_of(case.op))
    plan = make_plan(lambda _: graph, graph.params, {gpu.name: gpu}, Allocator({gpu.name: gpu}))
    return [launch for split in plan.splits for launch in gpu.lower(plan, split)[1]]


def variants(some: Iterable[Case]) -> list[Launch]:
    """One launch for each kernel and set of constants, by family."""
    found: dict[tuple[object, ...], Launch] = {}
    for case in some:
        for launch in launches(case):
            found.setdefault((launch.family, launch.kernel, launch.constants), launch)
    return sorted(found.values(), key=lambda launch: launch.family)


def compile_all(some: Iterable[Case], mode: str = "fast") -> None:
    """Compile every kernel that the cases need, in parts."""
    wanted = variants(some)
    for family in {launch.family for launch in wanted}:
        simulator.library(family)
    parts = [wanted[i : i + CHUNK] for i in range(0, len(wanted), CHUNK)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: simulator.prepare(part, mode), parts))


def by_name(name: str) -> Case:
    return next(case for case in cases.all_cases() if case.name == name)
