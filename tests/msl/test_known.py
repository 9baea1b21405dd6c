"""Kernels with known answers: on every compiler found, in every order of lanes, in fast and in checked mode.

Every expected value is computed by numpy, not by another path through the translator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer.msl import Binding, Library, MslError

METAL = Path(__file__).parent / "metal"
MODES: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {"order": "backward"},
    "shuffled": {"order": "shuffled", "seed": 7},
    "checked": {"check": True},
    "checked backward": {"check": True, "order": "backward"},
}
CONSTANTS: dict[str, list[dict[str | int, Any]]] = {
    "specialized": [{"has_bias": True, "repeat": 3}, {0: False, 1: 2, 2: 2.5}]
}
rng = np.random.default_rng(5)
_libraries: dict[str, Library] = {}


@pytest.fixture(scope="session")
def lib(compiler: str) -> Library:
    """known.metal, with every kernel built at once in the modes that are tested."""
    if compiler not in _libraries:
        library = Library.from_file(METAL / "known.metal", compiler=compiler)
        wanted = [(n, c) for n in library.kernel_names for c in CONSTANTS.get(n, [{}])]
        for mode in ("fast", "checked"):
            library.prepare(wanted, mode)
        _libraries[compiler] = library
    return _libraries[compiler]


@pytest.fixture(params=MODES)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


def f32(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.standard_normal(shape).astype(np.float32)


def test_vectors(lib: Library, how: dict[str, Any]) -> None:
    x, p = f32(9, 4), f32(9, 3)
    y, before = np.zeros((9, 8), np.float32), p.copy()
    lib.kernel("vectors").dispatch_threads(9, 4, x, y, p, **how)
    v = x.copy()
    v[:, [0, 1]] = x[:, [1, 0]]
    v[:, 3] += v[:, 0] + v[:, 1] * 2 + v[:, 2] * 3
    np.testing.assert_allclose(y[:, :4], np.stack([v[:, 2], v[:, 3], v[:, 0] * 2, v[:, 1] * 2], 1), rtol=1e-6)
    np.testing.assert_array_equal(y[:, 4], (x[:, 0].view(np.uint32) >> 23).astype(np.float32))
    np.testing.assert_array_equal(y[:, 5], 1)
    np.testing.assert_array_equal(y[:, 6], np.where(v[:, 0] > 0, 1, -1))
    np.testing.assert_array_equal(y[:, 7], x[:, 2].astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(p, before[:, ::-1] + np.float32(1))


def test_literals(lib: Library, how: dict[str, Any]) -> None:
    y, h = np.zeros(8, np.float32), np.zeros(2, np.float16)
    lib.kernel("literals")(1, 1, y, h, **how)
    np.testing.assert_array_equal(y, np.array([1 / 3, 0, 1, 3.5, 65504, np.pi, 7, 5], np.float32))
    np.testing.assert_array_equal(h, np.array([1.5, 1 / 3], np.float16))


def test_half_rounds_after_every_operation_and_bfloat_to_nearest_even(lib: Library, how: dict[str, Any]) -> None:
    n = 512
    a, b = f32(n).astype(np.float16), f32(n).astype(np.float16)
    f = f32(n)
    f[:4] = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7FC00001], np.uint32).view(
        np.float32
    )  # ties, overflow, NaN
    y, z = np.zeros(n, np.float16), np.zeros(n, np.uint16)
    lib.kernel("rounding")(n // 32, 32, a, b, y, z, f, **how)
    np.testing.assert_array_equal(y, a * b + a)
    bits = f.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(z[:3], [0x3F80, 0x3F82, 0x7F80])
    assert z[3] & 0x7FFF > 0x7F80
    np.testing.assert_array_equal(z[4:], expected[4:])


def test_math(lib: Library, how: dict[str, Any]) -> None:
    n = 64
    x = np.linspace(-3, 3, n, dtype=np.float32)
    y = np.zeros((32, n), np.float32)
    lib.kernel("math")(2, 32, x, y, np.uint32(n), **how)
    v = x.astype(np.float64)
    u = np.abs(v) + 0.25
    s = np.clip((v + 1) / 2, 0, 1)
    away = np.sign(v) * np.floor(np.abs(v) + 0.5)
    expected = [
        np.exp(v),
        np.exp2(v),
        np.log(u),
        np.log2(u),
        np.sqrt(u),
        1 / np.sqrt(u),
        np.sin(v),
        np.cos(v),
        np.tanh(v),
        np.floor(v),
        np.ceil(v),
        away,
        np.rint(v),
        np.trunc(v),
        v - np.floor(v),
        np.clip(v, 0, 1),
        np.sign(v),
        u**1.5,
        np.fmod(v, 0.75),
        v * u + 1,
        v + (u - v) * 0.25,
        np.clip(v, -0.5, 0.5),
        np.arctan2(v, u),
        np.maximum(v, u),
        np.minimum(v, 0),
        (v >= 0) * 1.0,
        np.copysign(u, v),
        s * s * (3 - 2 * s),
        np.hypot(v, u),
        np.exp(v),
        10**v,
        np.sqrt(u),
    ]
    for k, e in enumerate(expected):
        np.testing.assert_allclose(y[k], e, rtol=2e-6, atol=3e-7, err_msg=f"function {k}")


def test_integers(lib: Library, how: dict[str, Any]) -> None:
    n = 64
    x = rng.integers(0, 2**32, n, dtype=np.uint32)
    x[:4] = [0, 1, 0xFFFFFFFF, 0x80000000]
    y = np.zeros((19, n), np.uint32)
    lib.kernel("integers")(2, 32, x, y, np.uint32(n), **how)

    def rows(v: int) -> list[int]:
        s = v - 2**32 if v >> 31 else v
        bits = f"{v:032b}"
        field = v >> 5 & 511
        return [
            bits.count("1"),
            32 - v.bit_length(),
            32 if v == 0 else (v & -v).bit_length() - 1,
            int(bits[::-1], 2),
            v << 7 | v >> 25,
            v * 0x9E3779B9 >> 32,
            s * 12345 >> 32,
            abs(v - 1000),
            min(v + 2**31, 2**32 - 1),
            max(s - (2**31 - 1), -(2**31)),
            field,
            field - 512 if field >> 8 else field,
            v & ~0x3F0 | 0x30,
            (v + 3) >> 1,
            abs(s),
            min(max(v, 10), 2000),
            max(v, 77),
            min(v, 77),
            (v & 0xFFF) * 3 + 1,
        ]

    expected = np.array([[r & 0xFFFFFFFF for r in rows(int(v))] for v in x], np.uint32).T
    np.testing.assert_array_equal(y, expected)


def test_matrices(lib: Library, how: dict[str, Any]) -> None:
    x, y = f32(16), np.zeros(13, np.float32)
    lib.kernel("matrices")(1, 1, x, y, **how)
    m = x.reshape(4, 4).T  # columns are consecutive
    v = np.arange(1, 5, dtype=np.float32)
    np.testing.assert_allclose(y, np.concatenate([m @ v, v @ m, (m @ m.T)[0, :], [-2]]), rtol=1e-5, atol=1e-5)


def test_templates_and_function_pointers(lib: Library, how: dict[str, Any]) -> None:
    x, y = f32(20), np.zeros(10, np.float32)
    lib.kernel("sum2_f32")(1, 10, x, y, **how)
    np.testing.assert_array_equal(y, x[::2] + x[1::2])
    xi, yi = np.arange(30, dtype=np.int32), np.zeros(10, np.int32)
    lib.kernel("sum3_i32")(1, 10, xi, yi, **how)
    np.testing.assert_array_equal(yi, xi.reshape(10, 3).sum(1))
    z = np.zeros(2, np.float32)
    lib.kernel("pointers_to_functions")(1, 1, x, z, **how)
    np.testing.assert_allclose(z, [x[:4].sum() + 1, x[:4].prod() + 2], rtol=1e-6)


def test_function_constants(lib: Library, how: dict[str, Any]) -> None:
    y, bias = np.zeros(8, np.float32), f32(8)
    lib.kernel("specialized", CONSTANTS["specialized"][0])(1, 8, y, bias, **how)
    np.testing.assert_array_equal(y, bias + np.float32(6))
    lib.kernel("specialized", CONSTANTS["specialized"][1])(1, 8, y, None, **how)
    np.testing.assert_array_equal(y, 10)


def test_a_missing_function_constant_is_named(lib: Library) -> None:
    with pytest.raises(MslError, match=r"needs function constant 'repeat' \(index 1, int\)"):
        lib.kernel("specialized", {"has_bias": True})
    with pytest.raises(MslError, match="no function constant 'bias'"):
        lib.kernel("specialized", {"bias": 1})
    with pytest.raises(MslError, match="is of type int"):
        lib.kernel("specialized", {"has_bias": True, "repeat": 1.5})


def test_places_in_a_grid_that_threadgroups_do_not_divide(lib: Library, how: dict[str, Any]) -> None:
    y = np.zeros((5, 21, 8), np.uint32)
    lib.kernel("places").dispatch_threads((21, 5), (8, 2), y, **how)
    for gy in range(5):
        for gx in range(21):
            tx, ty, bx, by = gx % 8, gy % 2, gx // 8, gy // 2
            w, h = min(8, 21 - 8 * bx), min(2, 5 - 2 * by)
            flat = ty * w + tx
            expected = [
                tx + 100 * ty,
                bx + 100 * by,
                w + 100 * h,
                8 + 200,
                3 + 300,
                flat,
                flat % 32 + 100 * (flat // 32),
                1,
            ]
            assert list(y[gy, gx]) == expected


def test_simdgroup_and_quad_functions(lib: Library, how: dict[str, Any]) -> None:
    n = 64
    x, u = f32(n), rng.integers(1, 64, n, dtype=np.uint32)
    y, z = np.zeros((21, n), np.float32), np.zeros((9, n), np.uint32)
    lib.kernel("reductions")(1, n, x, u, y, z, **how)
    lane = np.arange(32)
    for g in range(2):
        v, w = x[32 * g : 32 * g + 32], u[32 * g : 32 * g + 32]
        q, wq = v.reshape(8, 4), w.reshape(8, 4)
        incl = np.cumsum(v.astype(np.float64))
        expected = [
            np.full(32, v.sum()),
            np.full(32, v.max()),
            np.full(32, v.min()),
            np.full(32, v.astype(np.float64).prod()),
            incl,
            incl - v,
            v[(lane * 7 + 3) % 32],
            v[lane ^ 5],
            np.where(lane >= 3, v[lane - 3], v),
            np.where(lane < 29, v[(lane + 3) % 32], v),
            np.full(32, v[9]),
            np.full(32, v[0]),
            v[(lane - 5) % 32],
            np.where(lane >= 4, v[lane - 4], -v[(lane + 28) % 32]),
            np.where(lane < 28, v[(lane + 4) % 32], -v[(lane - 28) % 32]),
            q.sum(1).repeat(4),
            q.max(1).repeat(4),
            v[lane ^ 2],
            q[:, 1].repeat(4),
            (np.cumsum(q, 1) - q).ravel(),
            np.full(32, v.sum() + 32),
        ]
        got = y[:, 32 * g : 32 * g + 32]
        for k, e in enumerate(expected):
            np.testing.assert_allclose(got[k], e, rtol=2e-5, atol=1e-5, err_msg=f"function {k}")
        ballot = int(sum(int(b & 1) << i for i, b in enumerate(w)))
        bits = [
            np.bitwise_and.reduce(w),
            np.bitwise_or.reduce(w),
            np.bitwise_xor.reduce(w),
            ballot,
            1,
            int((w == 5).any()),
            (lane == 0) * 1,
            (wq & 1).any(1).repeat(4),
            (wq & 1).all(1).repeat(4),
        ]
        for k, b in enumerate(bits):
            np.testing.assert_array_equal(z[k, 32 * g : 32 * g + 32], b, err_msg=f"integer function {k}")


@pytest.mark.parametrize("threads", [32, 96, 256])
def test_rms_norm(lib: Library, how: dict[str, Any], threads: int) -> None:
    x, w = f32(3, 200), f32(200)
    y = np.zeros_like(x)
    args = np.array([(200, 1e-5)], np.dtype([("n", "u4"), ("eps", "f4")]))
    lib.kernel("rms_norm")(3, threads, x, w, y, args, **how)
    np.testing.assert_allclose(
        y, x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * w, rtol=2e-6, atol=1e-6
    )


def test_threadgroup_memory(lib: Library, how: dict[str, Any]) -> None:
    x = f32(16, 16)
    y = np.zeros_like(x)
    lib.kernel("transpose_tiles")((2, 2), (8, 8), x, y, np.uint32(16), threadgroup_memory={1: 256}, **how)
    np.testing.assert_array_equal(y, x.T + np.float32(1))


def test_simdgroup_barriers_order_memory(lib: Library, how: dict[str, Any]) -> None:
    x, y = f32(64), np.zeros(64, np.float32)
    lib.kernel("neighbours")(1, 64, x, y, **how)
    swapped = x.reshape(-1, 2)[:, ::-1].ravel() + np.float32(1)
    np.testing.assert_array_equal(y, swapped.reshape(2, 32)[:, ::-1].ravel())


def test_atomics(lib: Library, how: dict[str, Any]) -> None:
    x = rng.integers(0, 1000, 256, dtype=np.uint32)
    counts, low, total = np.zeros(8, np.uint32), np.array([2**30], np.int32), np.zeros(1, np.float32)
    lib.kernel("histogram")(4, 64, x, counts, low, total, **how)
    np.testing.assert_array_equal(counts, np.bincount(x & 7, minlength=8))
    assert (low[0], total[0]) == (x.min(), 128)


def q4_1(rows: int, cols: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Random Q4_1 blocks (rows, cols/32) and the float64 matrix they stand for."""
    blocks = np.zeros((rows, cols // 32), np.dtype([("d", "f2"), ("m", "f2"), ("qs", "u1", 16)]))
    blocks["d"], blocks["m"] = rng.uniform(0.01, 0.1, blocks.shape), rng.uniform(-0.5, 0.5, blocks.shape)
    blocks["qs"] = rng.integers(0, 256, (*blocks.shape, 16))
    q = np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], -1)
    return blocks, (q * blocks["d"].astype(np.float64)[..., None] + blocks["m"].astype(np.float64)[..., None]).reshape(
        rows, cols
    )


@pytest.mark.parametrize("rows", [64, 61])
def test_matvec_of_quantized_rows(lib: Library, how: dict[str, Any], rows: int) -> None:
    w, dense = q4_1(rows, 576)
    x, y = f32(576), np.zeros(rows, np.float32)
    lib.kernel("matvec_q4_1")(8, 64, w, x, y, np.uint32(rows), np.uint32(576), **how)
    np.testing.assert_allclose(y, dense @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_simdgroup_matrices(lib: Library, how: dict[str, Any], kind: str) -> None:
    m, n, k = 24, 16, 32
    a, b = f32(m, k), f32(n, k)
    c = np.zeros((m, n), np.float32)
    if kind == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
    stored = [(v.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else v for v in (a, b)]
    if kind == "bf16":
        a, b = ((s.astype(np.uint32) << 16).view(np.float32) for s in stored)
    lib.kernel(f"gemm_{kind}")((n // 8, m // 8), 32, *stored, c, np.array([m, n, k, 0], np.uint32), **how)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5)


def test_the_elements_that_a_lane_holds(lib: Library, how: dict[str, Any]) -> None:
    y = np.zeros((8, 8), np.float32)
    lib.kernel("fragments")(1, 32, y, **how)
    expected = np.arange(64, dtype=np.float32).reshape(8, 8) * 2
    for lane in range(32):  # two neighbours of a row; four lanes a row of a quarter
        quad = lane // 4
        row, col = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
        expected[row, col + 1] += 100 * lane
    np.testing.assert_array_equal(y, expected)


def test_attention(lib: Library, how: dict[str, Any]) -> None:
    heads, kv, n = 6, 2, 21
    q, k, v = f32(heads, 64), f32(n, kv, 64).astype(np.float16), f32(n, kv, 64).astype(np.float16)
    o = np.zeros_like(q)
    args = np.array([(n, heads, kv, 0.125)], np.dtype([("n", "u4"), ("h", "u4"), ("k", "u4"), ("s", "f4")]))
    lib.kernel("attention")(heads, 128, q, k, v, o, args, **how)
    kk, vv = (np.repeat(t.astype(np.float64), heads // kv, 1) for t in (k, v))
    s = np.einsum("hd,nhd->hn", q, kk) * 0.125
    p = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(o, np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), vv), rtol=1e-5, atol=1e-5)


def test_counters(lib: Library) -> None:
    w, _ = q4_1(16, 576)
    x, y = f32(576), np.zeros(16, np.float32)
    report = lib.kernel("matvec_q4_1")(
        2, 64, w, x, Binding(y, label="y"), np.uint32(16), np.uint32(576), check=True, count=True
    )
    assert report is not None
    c = report.counters
    assert (c.read_distinct[0], c.read_distinct[1], c.written[2], c.written_distinct[2]) == (
        w.nbytes,
        x.nbytes,
        y.nbytes,
        y.nbytes,
    )
    assert c.read[1] == 4 * x.nbytes  # each of four simdgroups reads the whole vector
    assert (c.barriers, c.collectives, c.matrix_operations) == (0, 16, 0)
    out = np.zeros((8, 8), np.float32)
    report = lib.kernel("gemm_f32")(
        1, 32, f32(8, 32), f32(8, 32), out, np.array([8, 8, 32, 0], np.uint32), check=True, count=True
    )
    assert report is not None
    assert report.counters.matrix_operations == 4
