"""How many threads the CPU backend uses: one a physical core that this process may run on, unless told otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from minfer.errors import RequestError

_chosen: int | None = None


def set_threads(threads: int | None) -> None:
    """Use this many threads in backends opened from now on; None goes back to the default."""
    global _chosen
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}, expected at least 1")
    _chosen = threads


def default_threads() -> int:
    """What `set_threads` chose, else the physical cores that the process may use, within its CPU quota."""
    return _chosen or max(1, min(_physical_cores(), _quota()))


def _physical_cores() -> int:
    if sys.platform == "darwin":
        return _performance_cores()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _performance_cores() -> int:
    """Apple: the fast cores alone; the slow ones would make every barrier wait for them."""
    import ctypes

    libc = ctypes.CDLL(None)
    value = ctypes.c_int32(0)
    size = ctypes.c_size_t(4)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value > 0:
            return value.value
    return os.cpu_count() or 1


def _quota() -> int:
    """CPUs that the control group allows (Linux containers); the number of CPUs where it sets no limit."""
    most = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return most if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return most
