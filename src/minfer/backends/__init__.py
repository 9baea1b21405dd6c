"""Devices that run graphs, by the name a user gives them."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import TYPE_CHECKING

from minfer.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from minfer.backends.base import Backend


def _reference(kv_format: str, threads: int | None = None) -> Backend:
    from minfer.backends.reference import ReferenceBackend

    return ReferenceBackend(kv_format, threads)


def _cpu(kv_format: str, threads: int | None = None) -> Backend:
    from minfer.backends.cpu import CpuBackend

    return CpuBackend(kv_format, threads)


def _simulator(kv_format: str) -> Backend:
    from minfer.backends.gpu.backend import GpuBackend
    from minfer.backends.gpu.devices.simulator import SimulatorDevice

    return GpuBackend(SimulatorDevice(), kv_format)


def _metal(kv_format: str) -> Backend:
    from minfer.backends.gpu.backend import GpuBackend
    from minfer.backends.gpu.devices.metal import MetalDevice

    return GpuBackend(MetalDevice(), kv_format)


def nvidia_driver() -> str | None:
    """Why the NVIDIA driver's library cannot be loaded, or None: asked before anything of CUDA is imported, as `auto`
    asks on every start."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        return str(error)
    return None


def _cuda(kv_format: str) -> Backend:
    if reason := nvidia_driver():
        raise UnsupportedError(f"no NVIDIA driver was found ({reason}): install the GPU's driver")
    from minfer.backends.gpu.backend import GpuBackend
    from minfer.backends.gpu.devices.cuda import CudaDevice

    return GpuBackend(CudaDevice(), kv_format)


DEVICES: dict[str, Callable[..., Backend]] = {
    "metal": _metal,
    "cuda": _cuda,
    "cpu": _cpu,
    "reference": _reference,
    "simulator": _simulator,
}
try:
    _built = importlib.util.find_spec("minfer.backends.cpu._native") is not None
except ImportError:  # looking for a module imports the package it is in, which needs that module
    _built = False
#: Devices that this installation lacks, and why.
MISSING: dict[str, str] = {}
if not _built:
    del DEVICES["cpu"]
    MISSING["cpu"] = "its native part is not built here: pip install . builds it"

#: What runs anywhere, best first; the first of them runs the layers that a GPU does not take.
HOSTS = tuple(name for name in ("cpu", "reference") if name in DEVICES)
HOST = HOSTS[0]
#: What `auto` may take, best first: the first that supports the whole model. A device that is only for tests, such as
#: the simulator, is taken when it is asked for by name.
AUTO = ("metal" if sys.platform == "darwin" else "cuda", *HOSTS)


def open_backend(device: str, kv_format: str, threads: int | None = None) -> Backend:
    """A new backend of this device; `threads` of the CPU, where it runs there: by default one a physical core.

    Raises `UnsupportedError` for a name that is not among `DEVICES`, and `RequestError` for fewer threads than one.
    """
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}, expected at least 1")
    if device not in DEVICES:
        raise UnsupportedError(f"no device named {device!r}; expected auto or one of {', '.join(DEVICES)}")
    return DEVICES[device](kv_format, threads) if device in HOSTS else DEVICES[device](kv_format)
