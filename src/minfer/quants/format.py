"""The shape of a block format: how many values share how many bytes, and how to go between the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minfer.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Blocks = NDArray[Any]  # a structured array [n_blocks]; its dtype is the block's byte layout

CHUNK_VALUES = 1 << 16  # values decoded at a time: temporaries stay in the L2 cache


@dataclass(frozen=True)
class Format:
    """One ggml tensor type.

    A row of `n` values is `n / block_size` blocks of `block_bytes` bytes, one after the other, little-endian.
    A format that is known by its size only (an integer type, a quant that minfer has no kernels for) has `computes`
    false: such a tensor can lie in a file, unused, but its values cannot be asked for.
    """

    name: str  # as ggml spells it: "Q4_K"
    id: int  # the type number in a GGUF file
    block_size: int  # values a block
    block_bytes: int
    layout: np.dtype[Any] | None = field(default=None, repr=False, compare=False)  # the fields of one block
    # Both fill their second argument: decode(blocks [b], values [b, block_size]), encode(values, blocks)
    decode: Callable[[Blocks, F32], None] | None = field(default=None, repr=False, compare=False)
    encode: Callable[[F32, Blocks], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout.itemsize != self.block_bytes:
            raise AssertionError(f"{self.name}: layout of {self.layout.itemsize} bytes, block of {self.block_bytes}")

    @property
    def computes(self) -> bool:
        """True where `dequantize` exists, so where the format may be a model's weight."""
        return self.decode is not None

    @property
    def quantizes(self) -> bool:
        """True where `quantize` exists."""
        return self.encode is not None

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` values; raises RequestError if the row is not a whole number of blocks."""
        if n < 0 or n % self.block_size:
            raise RequestError(
                f"a row of {n} values is not a whole number of {self.name} blocks: "
                f"expected a multiple of {self.block_size}"
            )
        return n // self.block_size * self.block_bytes

    def dequantize(self, raw: U8) -> F32:
        """Values of whole rows: uint8 `[..., row_bytes]` to a new float32 array `[..., n]`.

        Arithmetic is float32 in ggml's order, each step rounded. A scale of Inf or NaN gives what IEEE gives.
        Raises UnsupportedError for a size-only format, RequestError for bytes that are not whole blocks.
        """
        if self.decode is None or self.layout is None:
            raise UnsupportedError(f"minfer cannot compute with {self.name} (ggml type {self.id})")
        if raw.dtype != np.uint8 or raw.ndim == 0:
            raise RequestError(f"{self.name}: expected a uint8 array of rows, found {raw.dtype} of shape {raw.shape}")
        if raw.shape[-1] % self.block_bytes:
            raise RequestError(
                f"a row of {raw.shape[-1]} bytes is not a whole number of {self.name} blocks: "
                f"expected a multiple of {self.block_bytes}"
            )
        n = raw.shape[-1] // self.block_bytes * self.block_size
        out = np.empty((*raw.shape[:-1], n), np.float32)
        blocks = np.ascontiguousarray(raw).reshape(-1).view(self.layout)
        values = out.reshape(-1, self.block_size)
        step = max(1, CHUNK_VALUES // self.block_size)
        with np.errstate(invalid="ignore", over="ignore"):
            for i in range(0, len(blocks), step):
                self.decode(blocks[i : i + step], values[i : i + step])
        return out

    def quantize(self, values: F32) -> U8:
        """Bytes of whole rows: float32 `[..., n]` to a new uint8 array `[..., row_bytes]`.

        Nothing becomes Inf or NaN on the way: block formats refuse NaN and Inf, and every format refuses a finite
        value or a scale beyond its range. F32, F16 and BF16 can hold NaN and Inf, and keep them.
        Raises RequestError for these and for a row that is not whole blocks, UnsupportedError where not `quantizes`.
        """
        if self.encode is None or self.layout is None:
            raise UnsupportedError(f"minfer does not quantize to {self.name} (ggml type {self.id})")
        if values.dtype != np.float32 or values.ndim == 0:
            raise RequestError(
                f"{self.name}: expected a float32 array of rows, found {values.dtype} of shape {values.shape}"
            )
        out = np.zeros((*values.shape[:-1], self.row_bytes(values.shape[-1])), np.uint8)
        blocks = out.reshape(-1).view(self.layout)
        source = np.ascontiguousarray(values).reshape(-1, self.block_size)
        step = max(1, CHUNK_VALUES // self.block_size)
        for i in range(0, len(blocks), step):
            chunk = source[i : i + step]
            if self.block_size > 1 and not np.isfinite(chunk).all():
                at = i * self.block_size + int(np.flatnonzero(~np.isfinite(chunk))[0])
                raise RequestError(
                    f"value {at} is {source.flat[at]}: {self.name} shares one scale in a block and cannot hold it; "
                    "expected finite values"
                )
            self.encode(chunk, blocks[i : i + step])
        return out


def to_f16(values: F32, name: str, what: str) -> NDArray[np.float16]:
    """float32 to float16, round half to even; RequestError where the result is not finite."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    lost = ~np.isfinite(half)
    if lost.any():
        first = float(values[lost].flat[0])
        raise RequestError(f"{name}: a {what} of {first:g} is beyond the range of f16, expected at most 65504")
    return half
