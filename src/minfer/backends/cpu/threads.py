"""How many threads the CPU backend uses where it is not told: one a physical core that this process may run on."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_threads() -> int:
    """The physical cores that the process may use, within its CPU quota."""
    return max(1, min(_physical_cores(), _quota()))


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
