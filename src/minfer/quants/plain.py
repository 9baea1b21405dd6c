"""F32, F16, BF16: one value a block, little-endian IEEE (and bfloat16: the upper half of a float32)."""

from __future__ import annotations

import numpy as np

from minfer.errors import RequestError
from minfer.quants.format import F32 as F32Array
from minfer.quants.format import Blocks, Format


def _decode_float(blocks: Blocks, out: F32Array) -> None:
    out[:, 0] = blocks["x"]


def _encode_f32(values: F32Array, blocks: Blocks) -> None:
    blocks["x"] = values[:, 0]


def _encode_f16(values: F32Array, blocks: Blocks) -> None:
    with np.errstate(over="ignore"):
        half = values[:, 0].astype(np.float16)
    lost = np.isinf(half) & np.isfinite(values[:, 0])
    if lost.any():
        raise RequestError(f"F16: a value of {values[lost].flat[0]:g} is beyond the range of f16, 65504")
    blocks["x"] = half


def _decode_bf16(blocks: Blocks, out: F32Array) -> None:
    np.left_shift(blocks["x"], np.uint32(16), out=out[:, 0].view(np.uint32), dtype=np.uint32, casting="same_kind")


def _encode_bf16(values: F32Array, blocks: Blocks) -> None:
    """Round half to even on the upper 16 bits; a NaN keeps its sign and upper bits and is made quiet."""
    bits = np.ascontiguousarray(values[:, 0]).view(np.uint32)
    nan = np.isnan(values[:, 0])
    half = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    half[nan] = (bits[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    lost = ((half & 0x7FFF) == 0x7F80) & np.isfinite(values[:, 0])
    if lost.any():
        raise RequestError(f"BF16: a value of {values[lost].flat[0]:g} is beyond the range of bf16, about 3.39e38")
    blocks["x"] = half


F32 = Format("F32", 0, 1, 4, np.dtype([("x", "<f4")]), _decode_float, _encode_f32)
F16 = Format("F16", 1, 1, 2, np.dtype([("x", "<f2")]), _decode_float, _encode_f16)
BF16 = Format("BF16", 30, 1, 2, np.dtype([("x", "<u2")]), _decode_bf16, _encode_bf16)
