"""Every op case on every instruction set of this machine, against the oracle and against products by another way."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from native import FLOATS, ISAS, product, run

from minfer import cases
from minfer.backends.cpu import CpuBackend
from minfer.backends.reference import ReferenceBackend
from minfer.cases import Case, Value
from minfer.graph import ir
from minfer.graph.ir import Weight
from minfer.quants import FORMATS, KV_FORMATS

CASES = cases.all_cases()
#: A sum of f32 products in another order, and exp of another library, relative to the root mean square.
TIGHT = 2e-5


@functools.cache
def oracle(name: str) -> list[npt.NDArray[Any]]:
    case = next(case for case in CASES if case.name == name)
    return cases.run(case, ReferenceBackend(case.kv_format))


@pytest.mark.parametrize("isa", ISAS)
def test_every_case_is_within_its_class(isa: str) -> None:
    worst = []
    backend = CpuBackend(threads=1, isa=isa)
    for case in CASES:
        for threads in (1, 3):
            got = run(case, isa, threads)
            want = oracle(case.name)
            assert len(got) == len(want) > 0
            error = max(cases.error(g, w) for g, w in zip(got, want, strict=True))
            if not error <= backend.bound(case.graph("cpu").nodes[-1], case.kind, cases.BOUNDS[case.kind]):
                worst.append((case.name, threads, error))
    assert not worst


def matmul_case(type_: str, n_in: int, n_out: int, n: int) -> Case:
    weight = Weight("w.weight", type_, (n_in, n_out))
    return Case(f"exact/{type_}/{n_in}x{n_out}/n{n}", ir.MatMul(weight), (Value((n_in, n)),), "matmul")


def rows_of(type_: str) -> tuple[int, ...]:
    """Row lengths: one block, an odd number, one that ends inside a chunk of 256."""
    block = FORMATS[type_].block_size
    return {1: (1, 97, 256), 32: (32, 352, 576), 256: (256, 768)}[block]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", FORMATS)
def test_products_equal_those_of_the_rounded_activations(type_: str, isa: str) -> None:
    space = CpuBackend(threads=1, isa=isa).workspace
    edges = (1, 2, 3, space.gemm_tokens - 1, space.gemm_tokens, 8, 9, 33, 130)  # each side of every threshold
    for n_in in rows_of(type_):
        for n in dict.fromkeys(edges):
            for n_out in (1, space.panel_rows + 1, 3 * space.panel_rows) if n != 130 else (space.panel_rows + 1,):
                case = matmul_case(type_, n_in, n_out, n)
                (got,) = run(case, isa)
                want = product(case.data()["x0"], case.op.weight, case.weights()["w.weight"])
                scale = np.sqrt(np.mean(np.square(case.data()["x0"])) * n_in)  # of one output, its weights about 1
                assert np.abs(got - want).max() <= TIGHT * scale, case.name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", [("Q4_1", "Q4_1"), ("Q5_0", "Q8_0"), ("F16", "Q4_K")])
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_fused_products_equal_their_parts_bit_for_bit(types: tuple[str, str], n: int, isa: str) -> None:
    gate, up = (Weight(f"{name}.weight", t, (256, 40)) for name, t in zip(("gate", "up"), types, strict=True))
    gain = Weight("gain.weight", "F32", (256,))
    whole = ir.Project((gate, up), (gain, 1e-5), "swiglu")
    case = Case("fused", whole, (Value((256, n)),), "matmul")
    tensors = case.weights()

    def part(op: ir.Op, *inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        shapes = tuple(Value(x.shape[::-1]) for x in inputs)
        made = Case("part", op, shapes, "matmul")
        object.__setattr__(made, "data", lambda seed=0: {f"x{i}": x for i, x in enumerate(inputs)})
        object.__setattr__(made, "weights", lambda seed=0: tensors)
        (out,) = run(made, isa)
        return out

    normed = part(ir.RmsNorm(gain, 1e-5), case.data()["x0"])
    want = part(ir.SwiGLU(), part(ir.MatMul(gate), normed), part(ir.MatMul(up), normed))
    assert np.array_equal(run(case, isa)[0], want)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_are_quantized_as_quants_does(isa: str) -> None:
    space = CpuBackend(threads=1, isa=isa).workspace
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(640) * np.exp(rng.uniform(-40, 40, 20)).repeat(32)).astype(np.float32)
    x[32:64] = 0
    x[64:96] = np.arange(32) - 15.5  # ties
    x[64] = 127.0
    x[96:128] = 1e-42  # the inverse of the scale is not finite
    codes, d, sums, halves = (
        np.frombuffer(part, t) for part, t in zip(space.quantize(x), ("i1", "<f4", "<f4", "<f4"), strict=True)
    )
    blocks = x.reshape(20, 32)
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    for i, block in enumerate(blocks):
        if 1e-30 < scale[i] < 1e4:  # where the f16 scale of the format exists
            row = KV_FORMATS["q8_0"].pack(block[None])[0, 2:34].view(np.int8)
            assert np.array_equal(codes[32 * i : 32 * i + 32], row)
    assert np.array_equal(d[:20], scale)
    assert not codes[96:128].any()
    assert not codes[640:].any()
    whole = codes[:640].astype(np.float32)
    assert np.allclose(sums[:20], whole.reshape(20, 32).sum(1) * scale, rtol=1e-6)
    assert np.allclose(halves[:40], whole.reshape(40, 16).sum(1) * scale.repeat(2), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_kv_rows_are_packed_bit_for_bit(fmt: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    n = 96
    x = (rng.standard_normal((40, n)) * np.exp(rng.uniform(-20, 8, (40, 1)))).astype(np.float32)
    x[0] = 0
    x[1, :4] = 1e-7, -3e-8, 6.1e-5, 65500.0  # f16: subnormal, to zero, smallest normal, near the top
    kv = cases.KvFill(n, 40, tuple(range(40)), fmt)
    case = Case(
        "pack", ir.KvStore(0), (Value((n, 40)), Value((n, 40)), Value((40,), integers=tuple(range(40)))), "kv", kv
    )
    object.__setattr__(
        case, "data", lambda seed=0: {"x0": x, "x1": x[::-1].copy(), "x2": np.arange(40, dtype=np.int32)}
    )
    k, v = run(case, isa)
    packed = KV_FORMATS[fmt]
    assert np.array_equal(k, packed.unpack(packed.pack(x), n))
    assert np.array_equal(v, packed.unpack(packed.pack(np.ascontiguousarray(x[::-1])), n))


def test_the_float_types_are_those_without_blocks() -> None:
    assert {name for name, fmt in FORMATS.items() if fmt.block_size == 1} == set(FLOATS)
