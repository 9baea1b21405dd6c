"""What the tests of the block formats share: hand-written blocks, and the `gguf` package as a second opinion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minfer.quants import Format


def block(**parts: Any) -> np.ndarray:
    """Bytes of one block, in the order given: a list of bytes, or (length, {index: byte}) with zeros between."""
    out: list[int] = []
    for part in parts.values():
        if isinstance(part, tuple):
            length, some = part
            out += [some.get(i, 0) for i in range(length)]
        else:
            out += part
    return np.array(out, np.uint8)


def expect(n: int, default: float, some: Mapping[int | range, float]) -> np.ndarray:
    """n float32 values: `default`, except where `some` says otherwise; later entries win."""
    out = np.full(n, default, np.float32)
    for where, value in some.items():
        out[list(where) if isinstance(where, range) else where] = value
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit for bit; any NaN equals any NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.float32
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    np.testing.assert_array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


def check_dequantize(fmt: Format, seed: int = 0) -> None:
    """Against the gguf package: random bytes (so also scales of Inf and NaN), then the extremes of a byte."""
    rng = np.random.default_rng(seed)
    many = 70_000 // fmt.block_size * fmt.block_bytes  # more than one chunk
    rows = [rng.integers(0, 256, (3, many), dtype=np.uint8)]
    rows += [np.full((2, 4 * fmt.block_bytes), byte, np.uint8) for byte in (0, 1, 127, 128, 255)]
    for raw in rows:
        ours = fmt.dequantize(raw)
        with np.errstate(all="ignore"):
            theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType(fmt.id)).reshape(ours.shape)
        same_bits(ours, theirs)


def tricky_values(seed: int = 0) -> np.ndarray:
    """float32 [1536, 256]: normal values of many sizes, ties, constants, zeros, one-sided blocks."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((512, 256)) * 10.0 ** rng.uniform(-6, 4, (512, 1))
    grid = rng.integers(-16, 17, (512, 256)) / 2  # halves: ties abound
    odd = np.zeros((512, 256))
    odd[:64] = rng.standard_normal((64, 1))  # constant blocks
    odd[64:128] = np.abs(rng.standard_normal((64, 256))) + 100
    odd[128:192, ::32] = -127
    odd[192:256, 5] = 1e-7
    odd[256:320] = -0.0
    odd[320:] = rng.uniform(-1, 1, (192, 256)).astype(np.float16)
    return np.concatenate([normal, grid, odd]).astype(np.float32)


def check_quantize(fmt: Format, seed: int = 0) -> None:
    """Byte for byte what the gguf package writes."""
    values = tricky_values(seed)
    theirs = gguf.quantize(values, gguf.GGMLQuantizationType(fmt.id)).view(np.uint8)
    np.testing.assert_array_equal(fmt.quantize(values), theirs.reshape(len(values), -1))
