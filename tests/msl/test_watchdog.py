"""A launch that does not end is given up, in every mode, and the next one runs as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minfer.msl import LaunchError, Library
from minfer.msl.device import Device
from minfer.msl.recording import Bound, Launch, Recording, Run

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void endless(device volatile int * x [[buffer(0)]]) { while (x[0] == 0) x[1] += 1; }
kernel void meeting(device volatile int * x [[buffer(0)]]) {
    while (x[0] == 0) { simdgroup_barrier(mem_flags::mem_device); threadgroup_barrier(mem_flags::mem_device); }
}
kernel void sums(device int * x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = simd_sum(1); }
kernel void long_one(device volatile int * x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    for (int k = 0; k < 20000000; k++) x[i] += 1;
}
"""
LIBRARY = Library(SOURCE)


def is_well() -> None:
    x = np.zeros(1024, np.int32)
    LIBRARY.kernel("sums")(8, 128, x)
    assert (x == 32).all()


@pytest.mark.parametrize("name", ["endless", "meeting"])
@pytest.mark.parametrize("options", [{}, {"order": "shuffled"}, {"check": True}, {"order": "lockstep"}], ids=str)
def test_a_launch_without_end_is_given_up(name: str, options: dict[str, Any]) -> None:
    for threads in (1, 2):
        words = f"kernel {name}: no threadgroup has ended for 200 ms; the launch was given up"
        with pytest.raises(LaunchError, match=words):
            LIBRARY.kernel(name)(8, 64, np.zeros(1024, np.int32), timeout=0.2, os_threads=threads, **options)
        is_well()


def test_of_a_list_of_launches_the_endless_one_is_named() -> None:
    device = Device()
    library = device.library(SOURCE)
    bound = {0: Bound(device.buffer(4096))}
    launches = [Launch(library.kernel(name), (128, 1, 1), (64, 1, 1), bound) for name in ("sums", "meeting", "sums")]
    launches[1] = Launch(library.kernel("meeting"), (128, 1, 1), (64, 1, 1), {0: Bound(device.buffer(4096))})
    with pytest.raises(LaunchError, match="kernel meeting: no threadgroup has ended"):
        Recording(launches).run(Run(timeout=0.2))
    is_well()


def test_a_long_launch_that_goes_on_is_not() -> None:
    """Forty threadgroups of a fixed amount of work: together longer than the limit, each far below it."""
    x = np.zeros(40, np.int32)
    LIBRARY.kernel("long_one")(40, 1, x, timeout=0.5, os_threads=1)
    assert (x == 20000000).all()
