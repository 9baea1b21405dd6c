"""What the CPU backend's tests share: the instruction sets of this machine, and products by another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from minfer import cases
from minfer.backends.cpu import CpuBackend
from minfer.errors import RequestError
from minfer.quants import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from minfer.cases import Case
    from minfer.graph import ir

F32 = npt.NDArray[np.float32]
FLOATS = ("F32", "F16", "BF16")


def available(isa: str) -> bool:
    try:
        CpuBackend(threads=1, isa=isa)
    except RequestError:
        return False
    return True


ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(not available(isa), reason=f"this processor has no {isa}"))
    for isa in ("portable", "avx2", "avx512", "neon")
]


def run(case: Case, isa: str = "", threads: int = 2) -> list[npt.NDArray[Any]]:
    return cases.run(case, CpuBackend(case.kv_format, threads, isa=isa))


def rounded(x: F32) -> npt.NDArray[np.float64]:
    """x as products with block formats see it: each 32 values as d * code. Codes by `quants`, d before its rounding to
    f16. A row is padded to whole blocks (there are only whole ones)."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(axis=-1) / np.float32(127)
    stored = KV_FORMATS["q8_0"].pack(x.reshape(len(x), -1))[:, : x.shape[-1] // 32 * 34]
    codes = stored.reshape(len(x), -1, 34)[:, :, 2:].view(np.int8)
    return (codes.astype(np.float64) * d[..., None]).reshape(x.shape)


def product(x: F32, weight: ir.Weight, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Rows of x times the weight's rows, in f64, x rounded to 8 bits where the weight is in a block format."""
    values = FORMATS[weight.type].dequantize(raw).astype(np.float64)
    return (x.astype(np.float64) if weight.type in FLOATS else rounded(x)) @ values.T
