"""Results that are known exactly, whatever the order of sums; and windows that must not reach other rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_cases
import numpy as np
import pytest

from minfer import cases
from minfer.backends.gpu.backend import GATED_BOUND, HALF_BOUND
from minfer.backends.reference import ReferenceBackend
from minfer.cases import Case, KvFill, MemoryTensors, Value, random_rows
from minfer.graph import ir
from minfer.graph.ir import Weight
from minfer.quants import FORMATS, KV_FORMATS


def run(
    case: Case, weights: dict[str, np.ndarray[Any, Any]] | None = None, *, tensor_cores: bool = False, **inputs: Any
) -> np.ndarray[Any, Any]:
    """The case's value on the simulator, with weights and inputs of our own where they are given; `tensor_cores` takes
    the kernels made for them."""
    if weights is not None:
        raw = {w.name: FORMATS[w.type].quantize(weights[w.name].astype(np.float32)) for w in ir.weights_of(case.op)}
        object.__setattr__(case, "weights", lambda seed=0: MemoryTensors(raw))
    data = {**case.data(), **inputs}
    object.__setattr__(case, "data", lambda seed=0: data)
    gpu = gpu_cases.backend(case)
    if tensor_cores:
        gpu.device.profile = dataclasses.replace(gpu.device.profile, extra=frozenset(["mma"]))
    return np.asarray(cases.run(case, gpu)[0])


@pytest.mark.parametrize("n", [1, 8])
def test_constants_through_norm_and_matmul(n: int) -> None:
    """A constant vector normalizes to ones; 0.5 (gain) x 0.25 (weight) x 4096 (terms) is 512, exactly."""
    op = ir.Project((Weight("w", "F16", (4096, 3)),), (Weight("g", "F32", (4096,)), 0.0))
    case = Case("constants", op, (Value((4096, n), fill=7.0),), "matmul")
    weights = {"w": np.full((3, 4096), 0.25), "g": np.full((1, 4096), 0.5)}
    assert np.array_equal(run(case, weights), np.full((n, 3), 512, np.float32))


def test_constants_through_norm_then_many_products() -> None:
    """The same in two launches, as many tokens take it."""
    gain = ir.RmsNorm(Weight("g", "F32", (4096,)), 0.0)
    normed = run(Case("norm", gain, (Value((4096, 9), fill=7.0),), "norm"), {"g": np.full((1, 4096), 0.5)})
    assert np.array_equal(normed, np.full((9, 4096), 0.5, np.float32))
    case = Case("constants", ir.MatMul(Weight("w", "F16", (4096, 3))), (Value((4096, 9)),), "matmul")
    assert np.array_equal(run(case, {"w": np.full((3, 4096), 0.25)}, x0=normed), np.full((9, 3), 512, np.float32))


@pytest.mark.parametrize("type_", ["F16", "BF16"])
@pytest.mark.parametrize("n", [1, 9])
def test_half_weights_are_the_converted_values(type_: str, n: int) -> None:
    """A one-hot input picks a column of the weight: its bits are those of the shifted or converted values."""
    values = np.random.default_rng(0).standard_normal((37, 97)).astype(np.float32)
    case = Case("onehot", ir.MatMul(Weight("w", type_, (97, 37))), (Value((97, n)),), "matmul")
    picked = np.arange(n) * 7
    got = run(case, {"w": values}, x0=np.eye(97, dtype=np.float32)[picked])
    if type_ == "F16":
        want = values.astype(np.float16).astype(np.float32)
    else:
        bits = values.view(np.uint32)
        want = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert np.array_equal(got, want[:, picked].T)


def test_values_beyond_f16_stay_finite_in_a_matrix_product() -> None:
    case = Case("large", ir.MatMul(Weight("w", "F32", (64, 8))), (Value((64, 16), fill=2.0**20),), "matmul")
    got = run(case, {"w": np.full((8, 64), 2.0**17)})
    assert np.array_equal(got, np.full((16, 8), 2.0**43, np.float32))


# --- attention ---------------------------------------------------------------------------------------------------


def windowed(layout: int, window: tuple[int, ...], n: int, fmt: str = "f32", sliding: int | None = None) -> Case:
    return cases.windowed(f"window{layout}", layout, window, n, fmt, sliding)


@pytest.mark.parametrize("fmt", KV_FORMATS)
@pytest.mark.parametrize(("layout", "window"), [(2, (17, 18)), (8, (0, 0, 17, 1, 0, 0, 0, 0))])
def test_a_window_of_one_row_returns_that_v_row(fmt: str, layout: int, window: tuple[int, ...]) -> None:
    case = windowed(layout, window, 1, fmt)
    got = run(case).reshape(4, 64)
    kept = KV_FORMATS[fmt].unpack(KV_FORMATS[fmt].pack(case.data(0)["kv_v"]), 128)[17].reshape(2, 64)
    assert np.array_equal(got, np.repeat(kept, 2, axis=0))


def test_a_query_without_rows_gives_zeros() -> None:
    assert not run(windowed(2, (5, 5), 1)).any()
    assert not run(windowed(8, (9, 0) * 4, 1)).any()


def test_a_window_shifted_by_one_changes_the_result() -> None:
    here, shifted = (run(windowed(2, span, 1)) for span in ((10, 20), (11, 21)))
    assert np.abs(here - shifted).max() > 1e-3


@pytest.mark.parametrize("n", [1, 20])
def test_keys_with_a_bias_of_600_stay_finite(n: int) -> None:
    case = cases.causal("bias", 64, 2, 1, n, 30)
    got = run(case, kv_k=case.data()["kv_k"] + 600)
    assert np.isfinite(got).all()


def test_a_block_of_zeros_in_q8_0_stays_zero() -> None:
    kv = KvFill(64, 4, (0, 1), "q8_0")
    inputs = (Value((64, 2), fill=0.0), Value((64, 2), fill=0.0), Value((2,), integers=(0, 1)))
    case = Case("zeros", ir.KvStore(0), inputs, "exact", kv)
    assert not np.asarray(cases.run(case, gpu_cases.backend(case))).any()


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("sliding", [None, 5])
def test_rows_outside_a_query_s_window_do_not_reach_it(n: int, sliding: int | None) -> None:
    """NaN in the last row's value (and key) makes the last query NaN, and no other: 0 x NaN is never added."""
    case = cases.causal("nan", 64, 2, 1, n, 30, sliding=sliding)
    clean = run(case)
    data = case.data(0)
    k, v = data["kv_k"].copy(), data["kv_v"].copy()
    k[-1], v[-1] = np.nan, np.nan
    got = run(case, kv_k=k, kv_v=v)
    assert np.isnan(got[-1]).all()
    assert np.array_equal(got[:-1], clean[:-1])
    # The rows before a sliding window
    if sliding:
        k, v = data["kv_k"].copy(), data["kv_v"].copy()
        k[: 31 - sliding], v[: 31 - sliding] = np.nan, np.nan
        assert np.array_equal(run(case, kv_k=k, kv_v=v), clean)


@pytest.mark.parametrize("n_cells", [40, 2000])
@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_nan_in_a_window_is_not_hidden(fmt: str, n_cells: int) -> None:
    """Whole or split, stored in any format: a NaN reaches the result, where the check on the logits finds it."""
    case = cases.causal("nan", 64, 2, 1, 1, 30)
    case = Case(case.name, case.op, case.inputs, case.kind, KvFill(64, n_cells, tuple(range(31)), fmt))
    v = case.data(0)["kv_v"].copy()
    v[7, 3] = np.nan
    got = run(case, kv_v=v)[0].reshape(2, 64)
    assert np.isnan(got[:, 3]).all()
    k = case.data(0)["kv_k"].copy()
    k[7, 3] = np.nan
    assert np.isnan(run(dataclasses.replace(case), kv_k=k)).all()


def lengths(step: int) -> list[int]:
    return list(range(1, 201, step))


def check_length(total: int, fmt: str) -> None:
    """All of `total` rows as one batch, and the last query alone, against the definition."""
    for n in {total, 1}:
        case = cases.causal(f"length{total}", 40, 2, 1, n, total - n, fmt)
        got = run(case)
        data = case.data(0)
        k, v = (KV_FORMATS[fmt].unpack(KV_FORMATS[fmt].pack(data[name]), 40) for name in ("kv_k", "kv_v"))
        q = data["x0"].reshape(n, 2, 40).astype(np.float64)
        scores = np.einsum("nhd,td->nht", q, k) / np.sqrt(40)
        later = np.arange(total)[None] > (total - n + np.arange(n))[:, None]
        scores = np.where(later[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("nht,td->nhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, 80)
        assert cases.error(got, want.astype(np.float32)) < cases.BOUNDS["attention"], (total, n)


def test_lengths_around_the_tile() -> None:
    for total in (1, 7, 8, 9, 63, 64, 65, 72, 128, 129, 200):
        check_length(total, "f32")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_every_length_to_200(fmt: str) -> None:
    for total in lengths(1):
        check_length(total, fmt)


def test_split_attention_agrees_with_whole() -> None:
    """4096 cells make 16 splits, most of them empty."""
    case = cases.causal("split", 64, 6, 2, 1, 700)
    case = Case(case.name, case.op, case.inputs, case.kind, KvFill(128, 4096, case.kv.cells))
    names = [launch.kernel for launch in gpu_cases.launches(case)]
    assert names[-2:] == ["attention_g4", "attention_combine"]
    got = run(case)
    want = cases.run(case, ReferenceBackend())[0]
    assert cases.error(got, want) < cases.BOUNDS["attention"]


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_tiles_read_the_rows_of_their_queries_and_no_others(fmt: str) -> None:
    """Spans of two sequences far apart: the rows between, and in the tiles beside, are never touched."""
    case = gpu_cases.by_name(f"attn/spans/two/{fmt}")
    gpu = gpu_cases.backend(case, check=True)
    cases.run(case, gpu)
    (tiled,) = [(s, r) for s, r in gpu.device.reports if s.launch.kernel == "attention_tiled"]
    spans = np.array(case.inputs[2].integers).reshape(-1, 2)
    rows = {cell for low, high in spans for cell in range(low, high)}
    assert case.kv
    for slot in (4, 5):
        assert tiled[1].counters.read_distinct[slot] == len(rows) * KV_FORMATS[fmt].row_bytes(case.kv.n_values)


# --- products of halves -----------------------------------------------------------------------------------------


def eleven_bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(fraction * 2048) / 2048, exponent).astype(np.float32)


@pytest.mark.parametrize("type_", ["F32", "BF16", "F16", "Q8_0", "Q4_0", "IQ4_NL", "MXFP4", "Q6_K", "Q4_K"])
def test_one_hot_inputs_give_the_weights_in_eleven_bits(type_: str) -> None:
    """Powers of two lose nothing as halves, nor do codes and scales of 11 bits: the decoded weight, rounded once. A
    K-quant's scales are rounded before that, and its minima are subtracted."""
    super_ = FORMATS[type_].block_size == 256
    n_in = 256 if super_ else 97 if FORMATS[type_].block_size == 1 else 96
    weight = Weight("w", type_, (n_in, 37))
    case = Case("onehot", ir.MatMul(weight), (Value((n_in, 40)),), "matmul")
    picked, factors = np.arange(40) * 2, np.float32(2.0) ** np.arange(-40, 40, 2, dtype=np.float32)
    x = np.eye(n_in, dtype=np.float32)[picked] * factors[:, None]
    raw = random_rows(weight, np.random.default_rng(1))
    object.__setattr__(case, "weights", lambda seed=0: MemoryTensors({"w": raw}))
    values = FORMATS[type_].dequantize(raw)
    got = run(case, x0=x, tensor_cores=True) / factors[:, None]
    if super_:
        most = np.abs(values).max(1) if type_ == "Q4_K" else np.abs(values[:, picked].T)
        assert (np.abs(got - values[:, picked].T) <= 2**-10 * most).all()
    else:
        assert np.array_equal(got, eleven_bits(values[:, picked].T))


@pytest.mark.parametrize("type_", ["F32", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("sizes", [(1, 1e12, 1e-9, 1e15, 1), (1e15, 1, 1e-12, 1, 1e14), (0, 0, 1e-8, 0, 1)])
def test_a_rows_blocks_may_grow_and_shrink(type_: str, sizes: tuple[float, ...]) -> None:
    """Blocks of a row share one power of two, which grows as they do."""
    scale = 1.0 if type_ == "F32" else 2.0**-16  # the formats' own scales are halves
    sizes = tuple(s if type_ == "F32" else s**0.25 for s in sizes)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((37, 1280)) * np.repeat(sizes, 256) * scale
    x = (rng.standard_normal((9, 1280)) + 0.1).astype(np.float32)
    case = Case("grows", ir.MatMul(Weight("w", type_, (1280, 37))), (Value((1280, 9)),), "matmul")
    got = run(case, {"w": values}, x0=x, tensor_cores=True)
    kept = FORMATS[type_].dequantize(FORMATS[type_].quantize(values.astype(np.float32))).astype(np.float64)
    assert kept.any()
    error = np.abs(got - x.astype(np.float64) @ kept.T)
    assert (error <= 2**-9 * np.sqrt((x.astype(np.float64) ** 2) @ (kept**2).T) + 2.0**-149).all()


def test_gated_products_are_a_class_of_their_own() -> None:
    worst = 0.0
    for seed in range(3):
        segments = tuple(Weight(f"w{i}{seed}", "Q4_K", (256, 64)) for i in range(2))
        case = Case(f"gated{seed}", ir.Project(segments, None, "swiglu", ()), (Value((256, 128)),), "matmul")
        gpu = gpu_cases.backend(case)
        gpu.device.profile = dataclasses.replace(gpu.device.profile, extra=frozenset(["mma"]))
        assert gpu.bound(case.graph(gpu.name).nodes[-1], case.kind, 0.0) == GATED_BOUND
        worst = max(worst, cases.error(cases.run(case, gpu)[0], cases.run(case, ReferenceBackend())[0]))
    assert worst <= GATED_BOUND


#: Cores for which 130 tokens by 200 rows are so many tiles.
TILES = {4: "128x64", 16: "128x64", 24: "64x64", 40: "32x32"}


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("cores", TILES)
def test_tiles_of_every_size_under_all_checks(type_: str, cores: int) -> None:
    """The depth, in two parts but for the first, is an odd number of chunks."""
    n_in = 768 if type_ == "Q4_K" else 640 - 32 * (type_ == "Q8_0")
    case = Case("tiles", ir.MatMul(Weight("w", type_, (n_in, 200))), (Value((n_in, 130)),), "matmul")
    gpu = gpu_cases.backend(case, check=True)
    gpu.device.profile = dataclasses.replace(
        gpu.device.profile, extra=frozenset(["mma"]), cores=cores, max_threadgroup_bytes=300_000
    )
    opened = cases.Opened(case, gpu)
    _, launch = (launch for listed in opened.launches() for launch in listed.launches)
    assert (launch.kernel, dict(launch.constants)["parts"]) == (f"gemm_mma_{TILES[cores]}", 1 if cores == 4 else 2)
    want = cases.run(case, ReferenceBackend())
    assert cases.error(cases.run(case, gpu)[0], want[0]) <= HALF_BOUND


def test_no_input_leaves_the_range_of_a_half() -> None:
    """Tokens from 1e-36 to 1e33: each is as good as one of ordinary size, zeros stay zeros, and what is beside a
    token in a batch does not change a bit of it."""
    rng = np.random.default_rng(2)
    sizes = np.array([1e-36, 1e-20, 1e-7, 1.0, 6e4, 7e4, 1e20, 1e33, 0.0, 3.0], np.float32)
    x = rng.standard_normal((len(sizes), 256)).astype(np.float32) * sizes[:, None]
    values = rng.standard_normal((37, 256)).astype(np.float32)
    case = Case("range", ir.MatMul(Weight("w", "Q4_1", (256, 37))), (Value((256, len(sizes))),), "matmul")
    got = run(case, {"w": values}, x0=x, tensor_cores=True)
    weights = FORMATS["Q4_1"].dequantize(FORMATS["Q4_1"].quantize(values)).astype(np.float64)
    for row, inputs, size in zip(got, x, sizes, strict=True):
        want = inputs.astype(np.float64) @ weights.T
        assert np.abs(row - want).max() <= HALF_BOUND * np.sqrt(np.mean(want**2)), size
    others = np.where(np.arange(len(sizes))[:, None] == 3, x, x[::-1])
    again = run(case, {"w": values}, x0=others.astype(np.float32), tensor_cores=True)
    assert np.array_equal(again[3], got[3])


def test_not_a_number_stays_with_its_token() -> None:
    x = np.ones((9, 64), np.float32)
    x[4, 7] = np.nan
    case = Case("nan", ir.MatMul(Weight("w", "Q8_0", (64, 3))), (Value((64, 9)),), "matmul")
    got = run(case, {"w": np.ones((3, 64))}, x0=x, tensor_cores=True)
    assert np.array_equal(np.isnan(got).all(axis=1), np.arange(9) == 4)
    np.testing.assert_allclose(got[0], 64, rtol=1e-3)
