"""The native runtime from Python: its structures, loading it, and running lists of launches."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from .compiler import NATIVE, Compiler, build, select
from .errors import LaunchError, ToolError

MAX_BUFFERS, MAX_THREADS, MAX_THREADGROUP_BYTES, SIMD_WIDTH = 31, 1024, 32768, 32
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2, "lockstep": 3}


class LaunchRecord(ctypes.Structure):
    """One launch in native memory (struct Launch in msl_rt.h). Addresses are plain integers; 0 is unbound."""

    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64 * MAX_BUFFERS),
        ("length", ctypes.c_uint64 * MAX_BUFFERS),
        ("tg_length", ctypes.c_uint32 * MAX_BUFFERS),
        ("groups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("grid", ctypes.c_uint32 * 3),
        ("flags", ctypes.c_uint32),
        ("checks", ctypes.c_uint64),
    )


class RunOptions(ctypes.Structure):
    """How a list of launches is run: OS threads, order of lanes and threadgroups, seed of a shuffle, and how long no
    threadgroup may begin or end."""

    _fields_ = (
        ("threads", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_uint64),
    )


class FailureRecord(ctypes.Structure):
    """Why a launch could not run to its end."""

    _fields_ = (
        ("code", ctypes.c_uint32),
        ("a", ctypes.c_uint32),
        ("b", ctypes.c_uint32),
        ("tid", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("launch", ctypes.c_uint32),
    )


#: A threadgroup that takes longer than this is taken for one that never ends.
TIMEOUT_S = 60.0
TIMED_OUT = 8
FAILURES = {
    1: "lanes of a simdgroup wait at different simdgroup functions (lines {a} and {b}); every lane must reach each",
    2: "threads of a threadgroup wait at different barriers (lines {a} and {b})",
    3: "threads wait for each other at lines {a} and {b}: a barrier or simdgroup function is not reached by all",
    4: "the kernel's threadgroup memory is {a} bytes or more; a threadgroup has {b}",
    5: "buffer {a} is not bound",
    6: "the runtime could not start its threads",
    7: "loops and calls are nested deeper than {a}",
    8: "no threadgroup has ended for {a} ms; the launch was given up, and what it wrote is not whole",
}


@cache
def library(compiler: Compiler) -> ctypes.CDLL:
    """Build (once, cached on disk) and load the runtime."""
    sources = {name: NATIVE / name for name in ("msl_rt.cpp", "checks.cpp")}
    path = build(compiler, dict(sources), ["-O2", "-pthread"], soname=True)
    lib = ctypes.CDLL(str(path))
    lib.msl_run.restype = ctypes.c_uint32
    lib.msl_run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    from .checks import ChecksRecord, FindingRecord  # they need this module's constants

    for i, struct in enumerate((LaunchRecord, RunOptions, FailureRecord, ChecksRecord, FindingRecord)):
        if lib.msl_layout(i) != ctypes.sizeof(struct):
            raise ToolError(f"{struct.__name__} does not have the size that the runtime expects")
    return lib


def runtime_path(compiler: Compiler) -> str:
    """The path of the loaded runtime, to link kernels against."""
    return str(library(compiler)._name)


@cache
def runtime_compiler() -> Compiler:
    """The compiler of the one runtime of this process: kernels of every compiler share it."""
    return select()


def default_threads() -> int:
    """OS threads of a launch unless told otherwise: the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def failure_text(failure: FailureRecord) -> str:
    """The sentence for a failure, with thread and threadgroup."""
    text = FAILURES.get(failure.code, "unknown failure").format(a=failure.a, b=failure.b)
    return text if failure.code == TIMED_OUT else f"{text} (thread {failure.tid} of threadgroup {tuple(failure.group)})"


def run(
    records: ctypes.Array[LaunchRecord],
    count: int,
    *,
    threads: int | None = None,
    order: str = "forward",
    seed: int = 0,
    names: object = None,
    timeout: float = TIMEOUT_S,
) -> None:
    """Run `count` launches one after the other in one native call. Raises LaunchError at the first that fails, and
    where no threadgroup begins or ends for `timeout` seconds."""
    lib = library(runtime_compiler())
    if order not in ORDERS:
        raise LaunchError(f"order {order!r} is none of {', '.join(ORDERS)}")
    options = RunOptions(threads or default_threads(), ORDERS[order], seed & (2**64 - 1), max(int(timeout * 1000), 1))
    failure = FailureRecord()
    done = lib.msl_run(ctypes.addressof(records), count, ctypes.addressof(options), ctypes.addressof(failure))
    if failure.code:
        name = names[done] if isinstance(names, (list, tuple)) and done < len(names) else "?"
        raise LaunchError(f"kernel {name}: {failure_text(failure)}")
