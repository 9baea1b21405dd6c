"""Op cases on the simulator: their launches, and compiling the kernels of many cases together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from minfer import cases
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.devices.simulator import SimulatorDevice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minfer.backends.gpu.launch import Launch
    from minfer.cases import Case


def backend(case: Case, *, extra: Iterable[str] = (), **options: object) -> GpuBackend:
    """A simulator; with the `extra` tiers and two cores, as a device that asks for them."""
    device = SimulatorDevice(**options)
    if extra:
        device.profile = dataclasses.replace(device.profile, extra=frozenset(extra), cores=2)
    return GpuBackend(device, case.kv_format)


def launches(case: Case, extra: Iterable[str] = ()) -> list[Launch]:
    """What the case would launch."""
    opened = cases.Opened(case, backend(case, extra=extra))
    return [launch for listed in opened.launches() for launch in listed.launches]


def variants(some: Iterable[Case], extra: Iterable[str] = ()) -> list[Launch]:
    """One launch for each kernel and set of constants, by family."""
    return simulator.variants(launch for case in some for launch in launches(case, extra))


def compile_all(some: Iterable[Case], mode: str = "fast", extra: Iterable[str] = ()) -> None:
    """Compile every kernel that the cases need, in parts."""
    simulator.prepare(variants(some, extra), mode)


def by_name(name: str) -> Case:
    return next(case for case in cases.all_cases() if case.name == name)
