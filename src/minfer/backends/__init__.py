"""Devices that run graphs, by the name a user gives them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from minfer.backends.base import Backend


def _reference(kv_format: str) -> Backend:
    from minfer.backends.reference import ReferenceBackend

    return ReferenceBackend(kv_format)


def _cpu(kv_format: str) -> Backend:
    from minfer.backends.cpu import CpuBackend

    return CpuBackend(kv_format)


#: Best first: `auto` takes the first that supports the whole model.
DEVICES: dict[str, Callable[[str], Backend]] = {"cpu": _cpu, "reference": _reference}
if importlib.util.find_spec("minfer.backends.cpu._native") is None:
    del DEVICES["cpu"]  # a source tree whose native part was not built


def open_backend(device: str, kv_format: str) -> Backend:
    """A new backend of this device. Raises `UnsupportedError` for a name that is not among `DEVICES`."""
    if device not in DEVICES:
        raise UnsupportedError(f"no device named {device!r}; expected auto or one of {', '.join(DEVICES)}")
    return DEVICES[device](kv_format)
