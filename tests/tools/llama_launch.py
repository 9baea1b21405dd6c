"""What llama_cases.py is made of: launches, argument structures read from ggml's header, random weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

if TYPE_CHECKING:
    from pathlib import Path

    Array = np.ndarray[Any, Any]

TYPES = {"int16_t": "<i2", "int32_t": "<i4", "int64_t": "<i8", "uint64_t": "<u8", "float": "<f4", "bool": "?"}
# Where a block keeps its half-precision scales, as byte offsets; random bytes there would be NaN or huge.
SCALES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_K": [80, 82], "q3_K": [108],
    "q4_K": [0, 2], "q5_K": [0, 2], "q6_K": [208], "iq4_nl": [0], "iq4_xs": [0], "iq2_xxs": [0],
    "iq3_s": [0], "mxfp4": [],
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One dispatch. `buffers` are in order of their slots; the same array twice is the same buffer."""

    file: str
    kernel: str
    groups: tuple[int, ...]
    threads: tuple[int, ...]
    buffers: list[Any]
    constants: dict[int, Any] = field(default_factory=dict)
    memory: int = 0


@dataclass(frozen=True)
class Case:
    """Launches one after the other and then what `got` must hold. A kernel with `lockstep` relies on lanes that advance
    together: it has a race without it."""

    launches: list[Launch]
    got: Array
    want: Array
    tolerance: float
    note: str = ""
    lockstep: bool = False

    @property
    def name(self) -> str:
        """The kernel that the case is about, and what is special."""
        return self.launches[-1].kernel.removeprefix("kernel_") + (f" ({self.note})" if self.note else "")


class Header:
    """The argument structures and macros of ggml-metal-impl.h."""

    def __init__(self, path: Path) -> None:
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        self.macros = {m[1]: int(m[2]) for m in re.finditer(r"#define (\w+) +(\d+)\s*\n", text)}
        self.structs: dict[str, np.dtype[Any]] = {}
        for m in re.finditer(r"typedef struct\s*\{(.*?)\}\s*ggml_metal_kargs_(\w+);", text, re.S):
            fields = re.findall(r"(\w+)\s+(\w+)(?:\[(\d+)\])?;", m[1])
            if all(f[0] in TYPES for f in fields):
                spec = [(name, TYPES[kind], int(n)) if n else (name, TYPES[kind]) for kind, name, n in fields]
                self.structs[m[2]] = np.dtype(spec, align=True)

    def args(self, struct: str, **values: Any) -> Array:
        """The structure with these fields, zero elsewhere; an unknown field is an error."""
        out = np.zeros(1, self.structs[struct])
        for name, value in values.items():
            out[name] = value
        return out


def shape(prefix: str, array: Array) -> dict[str, int]:
    """ne<prefix>0.. and nb<prefix>0.. of an array, innermost first."""
    dims = list(array.shape[::-1]) + [1] * (4 - array.ndim)
    strides = list(array.strides[::-1]) + [array.nbytes] * (4 - array.ndim)
    return {f"ne{prefix}{i}": dims[i] for i in range(4)} | {f"nb{prefix}{i}": strides[i] for i in range(4)}


def keep(header: Header, struct: str, values: dict[str, Any], **more: Any) -> Array:
    """args() of those values that the structure has."""
    names = header.structs[struct].names or ()
    return header.args(struct, **{k: v for k, v in values.items() if k in names}, **more)


def error(got: Array, want: Array) -> float:
    """The largest difference relative to the largest magnitude; inf where NaN or infinity differ."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    ok = np.isfinite(b)
    if not np.array_equal(a[~ok], b[~ok], equal_nan=True):
        return float("inf")
    return float(np.max(np.abs(a[ok] - b[ok]), initial=0) / max(float(np.max(np.abs(b[ok]), initial=0)), 1e-30))


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Maker:
    """Random inputs from one generator."""

    def __init__(self, header: Header, seed: int = 1) -> None:
        self.h, self.rng = header, np.random.default_rng(seed)

    def floats(self, *dims: int, kind: str = "<f4") -> Array:
        """Normally distributed numbers."""
        return self.rng.standard_normal(dims).astype(kind)

    def blocks(self, kind: str, rows: int, k: int) -> tuple[Array, Array]:
        """Random weights of a type: the bytes, and their values in float64."""
        if kind in ("f32", "f16"):
            w = self.floats(rows, k, kind="<f4" if kind == "f32" else "<f2")
            return w, w.astype(np.float64)
        which = GGMLQuantizationType[kind.upper()]
        items, size = GGML_QUANT_SIZES[which]
        raw = self.rng.integers(0, 256, (rows, k // items, size)).astype(np.uint8)
        for at in SCALES[kind]:
            scale = self.rng.uniform(0.005, 0.02, raw.shape[:2]).astype("<f2")
            raw[..., at : at + 2] = scale[..., None].view(np.uint8)
        if kind == "mxfp4":
            raw[..., 0] = self.rng.integers(120, 126, raw.shape[:2])
        raw = raw.reshape(rows, -1)
        spare = np.zeros((rows + 64, raw.shape[1]), np.uint8)  # the last threadgroup may read rows that are not there
        spare[:rows] = raw
        return spare[:rows], quants.dequantize(raw, which).reshape(rows, k).astype(np.float64)
