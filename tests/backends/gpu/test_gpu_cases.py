"""Every op case on the simulator against the reference, in both orders of lanes; and under all checks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import gpu_cases
from minfer import cases
from minfer.backends.reference import ReferenceBackend
from minfer.cases import Case

CASES = cases.all_cases()


@pytest.fixture(scope="module")
def compiled() -> None:
    gpu_cases.compile_all(CASES)


@cache
def expected(name: str) -> list[cases.Array]:
    case = gpu_cases.by_name(name)
    return cases.run(case, ReferenceBackend(case.kv_format))


def run(case: Case, **options: object) -> list[cases.Array]:
    gpu = gpu_cases.backend(case, **options)
    got = cases.run(case, gpu)
    assert gpu.device.encoded == len(case.graph(gpu.name).outputs[:1])  # it ran there, in one program
    return got


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    got = run(case)
    want = expected(case.name)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert cases.error(g, w) <= cases.BOUNDS[case.kind]
    for a, b in zip(run(case, order="backward"), got, strict=True):
        np.testing.assert_array_equal(a, b, "the order of the lanes changes the result")
