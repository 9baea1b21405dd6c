"""Planted faults are found, in every order of lanes, with kernel, line, buffer and threads; clean twins stay silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer.msl import Binding, CheckError, Finding, Library

METAL = Path(__file__).parent / "metal" / "faults.metal"
# kernel -> the kinds of findings of which at least one must be reported, and the name that it must carry
FAULTS: dict[str, tuple[set[str], str]] = {
    "device_read_overrun": ({"out-of-bounds read"}, "x"),
    "device_write_overrun": ({"out-of-bounds write", "race between threadgroups"}, "y"),
    "device_read_before": ({"out-of-bounds read"}, "x"),
    "threadgroup_write_overrun": ({"threadgroup out-of-bounds write"}, "s"),
    "threadgroup_read_overrun": ({"threadgroup out-of-bounds read"}, "d"),
    "uninitialised_threadgroup": ({"uninitialised threadgroup read"}, "s"),
    "missing_barrier_after_write": ({"threadgroup race"}, "s"),
    "missing_barrier_before_overwrite": ({"threadgroup race"}, "s"),
    "lockstep_assumed": ({"threadgroup race"}, "s"),
    "wrong_kind_of_barrier": ({"device race"}, "y"),
    "two_writers": ({"threadgroup race"}, "s"),
    "early_return": ({"barrier not reached by all"}, ""),
    "divergent_barrier": ({"divergent barrier"}, ""),
    "divergent_collective": ({"divergent collective"}, ""),
    "collective_after_return": ({"collective not reached by all"}, ""),
    "unbound": ({"unbound buffer"}, "z"),
    "misaligned": ({"misaligned access"}, "x"),
    "two_threadgroups_write": ({"race between threadgroups"}, "y"),
    "read_what_another_threadgroup_writes": ({"race between threadgroups"}, "y"),
    "atomic_and_plain": ({"race between threadgroups", "device race"}, "n"),
    "array_index": ({"index out of range"}, ""),
    "division": ({"division by zero"}, ""),
    "undeclared_write": ({"undeclared write"}, "y"),
    "undeclared_read": ({"undeclared read"}, "x"),
    "write_through_const": ({"undeclared write"}, "x"),
    "uninitialised_device": ({"uninitialised read"}, "y"),
    "in_a_function": ({"out-of-bounds read"}, "x"),
}
ORDERS: list[dict[str, Any]] = [{}, {"order": "backward"}, {"order": "shuffled", "seed": 3}]
_libraries: dict[str, Library] = {}


@pytest.fixture(scope="session")
def lib(compiler: str) -> Library:
    if compiler not in _libraries:
        _libraries[compiler] = Library.from_file(METAL, compiler=compiler)
        _libraries[compiler].prepare([(n, {}) for n in _libraries[compiler].kernel_names], "checked")
    return _libraries[compiler]


def lines_of(kernel: str) -> set[int]:
    """Lines marked HERE in a kernel, or in the function above it."""
    text = METAL.read_text().splitlines()
    start = next(k for k, line in enumerate(text) if f"kernel void {kernel}(" in line)
    end = next(k for k in range(start, len(text)) if text[k] == "}")
    if kernel.startswith("in_a_function"):
        start -= 3
    return {k + 1 for k in range(start, end) if "// HERE" in text[k]}


def run(lib: Library, name: str, how: dict[str, Any]) -> list[Finding]:
    """Two threadgroups of 64 threads on buffers of 128 floats."""
    kernel = lib.kernel(name)
    x, y, zero = np.arange(128, dtype=np.float32), np.zeros(128, np.float32), np.uint32(0)
    reads = (0, 256) if name.startswith("undeclared_read") else None
    writes = (0, 256) if name.startswith("undeclared_write") else None
    initialised = np.zeros(64, np.uint8) if name.startswith("uninitialised_device") else None
    buffers: list[object] = [
        Binding(x, reads=reads, label="weights"),
        Binding(y, writes=writes, initialised=initialised, label="result"),
        zero,
    ]
    if any(a.index == 3 for a in kernel.arguments):
        buffers.append(None if name.startswith("unbound") else np.zeros(1, np.uint32))
    memory = {a.index: 256 for a in kernel.arguments if a.kind == "threadgroup"}
    try:
        kernel(2, 64, *buffers, check=True, threadgroup_memory=memory, **how)
    except CheckError as error:
        return error.report.findings
    return []


@pytest.mark.parametrize("how", ORDERS, ids=["forward", "backward", "shuffled"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(lib: Library, name: str, how: dict[str, Any]) -> None:
    kinds, variable = FAULTS[name]
    found = [f for f in run(lib, name, how) if f.kind in kinds]
    assert found, f"{name} found nothing of {kinds}"
    f = found[0]
    assert (f.kernel, f.file, f.name) == (name, "faults.metal", variable)
    assert f.line in lines_of(name)
    assert 0 <= f.thread[0] < 64
    assert f.threadgroup[0] in (0, 1)
    assert f"faults.metal:{f.line}: {f.kind}: kernel {name}" in str(f)
    if variable in ("x", "y"):
        assert (f.buffer, f.label) == ({"x": 0, "y": 1}[variable], {"x": "weights", "y": "result"}[variable])
    if "race" in f.kind:
        assert f.other_thread is not None
        assert f.other_line in lines_of(name)
        assert (f.thread, f.threadgroup) != (f.other_thread, f.other_threadgroup)


@pytest.mark.parametrize("how", ORDERS, ids=["forward", "backward", "shuffled"])
@pytest.mark.parametrize("name", FAULTS)
def test_clean_twin_is_silent(lib: Library, name: str, how: dict[str, Any]) -> None:
    assert run(lib, f"{name}_ok", how) == []


def test_every_place_is_reported_once_with_a_count(lib: Library) -> None:
    found = run(lib, "uninitialised_threadgroup", {})
    assert [(f.kind, f.count) for f in found] == [
        ("uninitialised threadgroup read", 64)
    ]  # 32 threads of each threadgroup


def test_a_race_names_both_sides(lib: Library) -> None:
    f = run(lib, "read_what_another_threadgroup_writes", {})[0]
    here = sorted(lines_of("read_what_another_threadgroup_writes"))
    assert (f.line, f.other_line) == (here[1], here[0])
    assert (f.threadgroup, f.other_threadgroup, f.offset, f.size) == ((1, 0, 0), (0, 0, 0), 0, 4)


def test_threads_of_a_smaller_threadgroup_are_named_by_their_place(compiler: str) -> None:
    library = Library(
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void k(device float * x [[buffer(0)]], uint2 i [[thread_position_in_grid]]) { x[i.x + 10*i.y] = 1; }",
        compiler=compiler,
    )
    with pytest.raises(CheckError) as caught:  # (9, 4) is the first whose index reaches 49
        library.kernel("k").dispatch_threads((10, 5), (4, 4), np.zeros(49, np.float32), check=True)
    found = caught.value.report.findings
    assert [(f.thread, f.threadgroup, f.offset) for f in found] == [((1, 0, 0), (2, 1, 0), 196)]
