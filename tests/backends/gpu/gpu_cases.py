"""Op cases on the simulator: their launches, and compiling the kernels of many cases together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer import cases
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.devices.simulator import SimulatorDevice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minfer.backends.gpu.launch import Launch
    from minfer.cases import Case


def backend(case: Case, **options: object) -> GpuBackend:
    return GpuBackend(SimulatorDevice(**options), case.kv_format)  # type: ignore[arg-type]


def launches(case: Case) -> list[Launch]:
    """What the case would launch."""
    opened = cases.Opened(case, backend(case))
    return [launch for listed in opened.launches() for launch in listed.launches]


def variants(some: Iterable[Case]) -> list[Launch]:
    """One launch for each kernel and set of constants, by family."""
    return simulator.variants(launch for case in some for launch in launches(case))


def compile_all(some: Iterable[Case], mode: str = "fast") -> None:
    """Compile every kernel that the cases need, in parts."""
    simulator.prepare(variants(some), mode)


def by_name(name: str) -> Case:
    return next(case for case in cases.all_cases() if case.name == name)
