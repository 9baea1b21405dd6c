"""Kernels that rely on the lanes of a simdgroup advancing together: wrong in some order of lanes, right in lockstep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minfer.msl import CheckError, Library

SOURCE = """
#include <metal_stdlib>
using namespace metal;
#define IO device const float * x [[buffer(0)]], device float * y [[buffer(1)]], uint i [[thread_position_in_grid]], \\
           ushort lane [[thread_index_in_simdgroup]]

// every lane reads all values, then lane 0 overwrites the first
kernel void read_then_overwrite(IO) {
    threadgroup float s[32];
    s[lane] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float t = 0;
    for (int k = 0; k < 32; k++) t += s[k];
    if (lane == 0) s[0] = t;
    y[i] = s[lane] + t;
}
// a shift through memory, in place
kernel void shift(IO) {
    threadgroup float s[32];
    s[lane] = x[i];
    for (int k = 0; k < 3; k++) s[lane] = s[(lane + 1) % 32];
    y[i] = s[lane];
}
// lanes leave the loop at different times; inside it lane 0 writes for all, every time
kernel void loop_with_one_writer(IO) {
    threadgroup float s[2];
    float t = 0;
    for (int k = 0; k < lane % 3 + 1; k++) {
        if (lane == 0 || (k > 0 && lane == 1) || (k > 1 && lane == 2)) {
            s[0] = k + 1;
        }
        t += s[0];
    }
    y[i] = t;
}
// the store ends the loop's body: other lanes are back at its start, which is earlier in the source but later in time
kernel void last_in_the_loop(IO) {
    threadgroup float s[1];
    float t = 0;
    for (int k = 1; k < 4; k++) {
        const float u = simd_sum(x[i] * k);
        if (lane == 3) {
            t += u;
            s[0] = t;
        }
    }
    y[i] = s[0];
}
float helper(threadgroup float * s, ushort lane) {
    float before = s[(lane + 31) % 32];
    s[lane] = before * 2;
    return s[(lane + 1) % 32];
}
kernel void through_a_function(IO) {
    threadgroup float s[32];
    s[lane] = x[i];
    float a = 0, b = 0;
    if (lane < 40) a = helper(s, lane);
    b = helper(s, lane);
    y[i] = a + 1000*b;
}
// only some lanes come to the collective: it takes those
kernel void some_lanes(IO) {
    float t = x[i];
    if (lane < 5) t = simd_sum(t);
    else if (lane % 2) t = simd_max(t);
    y[i] = simd_sum(t);
}
kernel void do_and_while(IO) {
    threadgroup float s[32];
    s[lane] = x[i];
    int k = 0;
    do { s[lane] = s[(lane + 1) % 32]; } while (++k < 2);
    while (k-- > 0) s[lane] = s[(lane + 31) % 32];
    for (;;) { if (k++ > 1) break; s[lane] = s[(lane + 5) % 32]; }
    y[i] = s[lane];
}
"""
_libraries: dict[str, Library] = {}
rng = np.random.default_rng(1)


@pytest.fixture(scope="session")
def lib(compiler: str) -> Library:
    if compiler not in _libraries:
        _libraries[compiler] = Library(SOURCE, compiler=compiler)
        for mode in ("fast", "lockstep"):
            _libraries[compiler].prepare([(n, {}) for n in _libraries[compiler].kernel_names], mode)
    return _libraries[compiler]


def expected(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Line by line, all lanes at once."""
    lane = np.arange(32)
    if name == "read_then_overwrite":
        s, t = x.copy(), np.float32(0)
        for v in x:
            t += v
        s[0] = t
        return s + t
    if name == "shift":
        return np.roll(x, -3)
    if name == "loop_with_one_writer":
        return np.array([[1, 3, 6][k % 3] for k in lane], np.float32)
    if name == "last_in_the_loop":
        return np.full(32, x.sum() * 6)
    if name == "through_a_function":
        s = np.roll(x, 1) * 2
        a = np.roll(s, -1)
        s = np.roll(s, 1) * 2
        return a + 1000 * np.roll(s, -1)
    if name == "some_lanes":
        t = x.copy()
        t[:5] = x[:5].sum()
        odd = lane[(lane >= 5) & (lane % 2 == 1)]
        t[odd] = x[odd].max()
        return np.full(32, t.astype(np.float64).sum())
    s = np.roll(x, -2)
    s = np.roll(s, 2)
    return np.roll(s, -15)  # k counts from -1


NAMES = ["read_then_overwrite", "shift", "loop_with_one_writer", "last_in_the_loop", "through_a_function"]
NAMES += ["some_lanes", "do_and_while"]


@pytest.mark.parametrize("name", NAMES)
def test_lockstep_gives_what_hardware_gives(lib: Library, name: str) -> None:
    x = rng.integers(1, 100, 64).astype(np.float32)
    y = np.zeros(64, np.float32)
    kernel = lib.kernel(name)
    kernel(2, 32, x, y, order="lockstep")
    want = np.concatenate([expected(name, x[:32]), expected(name, x[32:])])
    np.testing.assert_allclose(y, want, rtol=1e-6)
    if name == "some_lanes":
        return  # other orders refuse it
    wrong = 0
    for order in ("forward", "backward"):
        kernel(2, 32, x, y, order=order)
        wrong += not np.allclose(y, want)
    assert wrong, "no order of lanes goes wrong: this kernel does not rely on lockstep"


def test_lockstep_can_be_checked_for_bounds(lib: Library) -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    assert not lib.kernel("shift")(2, 32, x, y, order="lockstep", check=True).findings
    with pytest.raises(CheckError, match="out-of-bounds read"):
        lib.kernel("shift")(2, 32, x[:40], y, order="lockstep", check=True)
