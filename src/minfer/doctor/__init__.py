"""A self-test of the devices of this machine: what is there, what each takes for granted, its kernels, its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from minfer import backends
from minfer.backends.base import Check
from minfer.doctor.kernels import ORACLE, Oracle, check_kernels
from minfer.doctor.machine import about, anonymous
from minfer.doctor.speed import measure
from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minfer.backends.base import Backend

__all__ = ["about", "examine"]


def examine(devices: Sequence[str] = (), *, risky: bool = False) -> Iterator[tuple[str, Check]]:
    """(part of the report, line), as they are found. Without `devices`: those that `auto` may take, if they are there.

    `risky` tries also what may take the system down. Raises `UnsupportedError` for a name that is no device's.
    """
    for name in devices:
        if name not in backends.DEVICES and name not in backends.MISSING:
            raise UnsupportedError(f"no device named {name!r}; expected one of {', '.join(backends.DEVICES)}")
    return ((part, _anonymous(check)) for part, check in _examine(tuple(dict.fromkeys(devices)), risky))


def _examine(devices: tuple[str, ...], risky: bool) -> Iterator[tuple[str, Check]]:
    opened: dict[str, Backend] = {}
    for name in (*backends.DEVICES, *backends.MISSING):
        wanted = name in (devices or backends.AUTO)
        backend, check = _find(name, wanted=wanted, named=name in devices)
        yield "devices", check
        if backend and wanted:
            opened[name] = backend
    oracle = Oracle()
    # The oracle first: should it be wrong here, what follows is compared with nothing.
    for name in sorted(opened, key=lambda name: name != ORACLE):
        backend = opened[name]
        yield from _part(f"what {name} takes for granted", backend.checks(risky=risky))
        against = "their definitions" if name == ORACLE else f"the {ORACLE}"
        with threadpool_limits(1, "blas"):  # cases are small: on a busy machine, threads would wait for each other
            yield from _part(f"kernels of {name} against {against}", check_kernels(name, oracle))
        caveat = f" ({backend.caveat})" if backend.caveat else ""
        yield from _part(f"speed of {name}{caveat}", measure(name, large_too=not backend.caveat))
        backend.close()


def _find(name: str, *, wanted: bool, named: bool) -> tuple[Backend | None, Check]:
    """A device, or why it is not there: which is a failure only where it was asked for."""
    if reason := backends.MISSING.get(name):
        return None, Check(name, "fail" if named else "skip", f"not here: {reason}")
    try:
        backend = backends.open_backend(name, "f32")
    except UnsupportedError as error:
        return None, Check(name, "fail" if named else "skip", f"not here: {error}")
    except Exception as error:  # whatever a driver raises belongs into the report
        return None, Check(name, "fail", f"{type(error).__name__}: {error}")
    facts = backend.facts()
    known = backend.memory()
    if known:
        facts["memory"] = f"{known[0] / 2**30:.1f} of {known[1] / 2**30:.1f} GiB free"
    text = ", ".join(f"{what}: {value}" for what, value in facts.items())
    if wanted:
        return backend, Check(name, "pass", text, facts)
    backend.close()
    return None, Check(name, "skip", f"here ({text}), not asked for: minfer doctor --device {name}", facts)


def _part(title: str, checks: Iterator[Check]) -> Iterator[tuple[str, Check]]:
    """A part of the report; what ends it early is its last line."""
    try:
        for check in checks:
            yield title, check
    except Exception as error:  # whatever a driver raises belongs into the report
        yield title, Check("the rest", "fail", f"not run: {type(error).__name__}: {error}")


def _anonymous(check: Check) -> Check:
    return Check(check.name, check.verdict, anonymous(check.text), check.values)
