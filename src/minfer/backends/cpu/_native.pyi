"""The native core (native/bindings.cpp). Buffers are flat uint8 arrays; operations are added in the order they run."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

class Workspace:
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def few_tokens(self) -> int: ...
    @property
    def gemm_tokens(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def quantize(self, x: _Floats) -> tuple[bytes, bytes, bytes, bytes]: ...

class Matrix: ...
class Kv: ...

def workspace(threads: int, isa: str) -> Workspace: ...
def matrix(type: str, data: _Bytes, n_in: int, n_out: int) -> Matrix: ...
def kv(format: str, n_cells: int, n_values: int, row_bytes: int, k: _Bytes, v: _Bytes) -> Kv: ...

class Program:
    def __init__(self, workspace: Workspace) -> None: ...
    def embed(self, name: str, ids: _Bytes, n: int, w: Matrix, out: _Bytes, /) -> None: ...
    def get_rows(self, name: str, x: _Bytes, n_rows: int, d: int, ids: _Bytes, n: int, out: _Bytes, /) -> None: ...
    def rms_norm(self, name: str, x: _Bytes, gain: _Floats, n: int, eps: float, out: _Bytes, /) -> None: ...
    def unary(self, name: str, kind: str, x: _Bytes, value: float, n: int, out: _Bytes, /) -> None: ...
    def binary(self, name: str, kind: str, x: _Bytes, y: _Bytes, n: int, out: _Bytes, /) -> None: ...
    def softmax(self, name: str, x: _Bytes, d: int, n: int, out: _Bytes, /) -> None: ...
    def top_k(self, name: str, x: _Bytes, d: int, n: int, k: int, out: _Bytes, /) -> None: ...
    def view(self, name: str, x: _Bytes, stride: int, start: int, size: int, n: int, out: _Bytes, /) -> None: ...
    def permute(self, name: str, x: _Bytes, extents: Sequence[int], strides: Sequence[int], out: _Bytes, /) -> None: ...
    def rope_table(
        self, name: str, positions: _Bytes, n: int, inverse: Sequence[float], magnitude: float, /
    ) -> int: ...
    def rope(
        self, name: str, x: _Bytes, table: int, head_dim: int, n_heads: int, neox: bool, out: _Bytes, /
    ) -> None: ...
    def kv_store(self, name: str, k: _Bytes, v: _Bytes, cells: _Bytes, n: int, kv: Kv, layer: int, /) -> None: ...
    def head_rope_store(
        self,
        name: str,
        qkv: _Bytes,
        cells: _Bytes,
        n: int,
        n_head: int,
        n_kv_head: int,
        table: int,
        head_dim: int,
        neox: bool,
        biases: tuple[_Floats, _Floats, _Floats] | None,
        q_gain: _Floats | None,
        q_eps: float,
        k_gain: _Floats | None,
        k_eps: float,
        kv: Kv,
        layer: int,
        out: _Bytes,
        /,
    ) -> None: ...
    def attn(
        self,
        name: str,
        q: _Bytes,
        positions: _Bytes,
        window: _Bytes | None,
        n: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        layout: int,
        scale: float,
        softcap: float,
        sliding: int,
        kv: Kv,
        layer: int,
        out: _Bytes,
        /,
    ) -> None: ...
    def project(
        self,
        name: str,
        x: _Bytes,
        n: int,
        segments: Sequence[Matrix],
        gain: _Floats | None,
        eps: float,
        epilogue: str,
        biases: Sequence[_Floats],
        residual: _Bytes | None,
        top_k: int,
        out: _Bytes,
        /,
    ) -> None: ...
    def run(self) -> None: ...
    def profile(self, on: bool, /) -> None: ...
    def profiled(self) -> list[tuple[str, float]]: ...
    @property
    def size(self) -> int: ...
    @property
    def barriers(self) -> int: ...
