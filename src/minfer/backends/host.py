"""What backends of the host's own memory share: buffers are numpy arrays, weights stay in the mapped file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.backends.base import Backend, Bytes, KvRegion, Progress, Tensors
from minfer.errors import DeviceMemoryError, RequestError
from minfer.quants import FORMATS
from minfer.quants import kv_format as parse_kv_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from minfer.graph.ir import Node, Weight


class HostBackend(Backend):
    """Memory, weights and KV regions; what runs is the subclass's."""

    def __init__(self, name: str, kv_format: str) -> None:
        self.name = name
        self.kv_format = parse_kv_format(kv_format)
        self.regions: dict[int, KvRegion] = {}
        self._tensors: Tensors | None = None

    def supports(self, node: Node) -> str | None:
        for weight in node.weights:
            if weight.type not in FORMATS:
                return f"{weight.name} is {weight.type}; it computes with {', '.join(FORMATS)}"
        return None

    def allocate(self, nbytes: int, label: str) -> Bytes:
        try:
            return np.zeros(nbytes, np.uint8)
        except MemoryError:
            known = self.memory()
            free = f"{known[0]:,}" if known else "an unknown number of"
            raise DeviceMemoryError(f"{label}: {nbytes:,} bytes asked for, {free} bytes free on {self.name}") from None

    def free(self, buffer: Bytes) -> None:
        pass  # numpy frees it with the last reference

    def write(self, buffer: Bytes, data: npt.NDArray[Any]) -> None:
        buffer.data[: data.nbytes] = data.tobytes()  # bytes in row order; the least that Python can do a step

    def read(self, buffer: Bytes, nbytes: int) -> Bytes:
        return buffer[:nbytes].copy()

    def view(self, buffer: Bytes, nbytes: int) -> Bytes:
        return buffer[:nbytes]

    def load_weights(self, tensors: Tensors, weights: Sequence[Weight], progress: Progress | None = None) -> None:
        self._tensors = tensors

    def data(self, weight: Weight) -> Bytes:
        """A weight's bytes in the mapped file, `(n_rows, row_bytes)`."""
        if self._tensors is None:
            raise RequestError(f"{weight.name}: this backend has no weights loaded")
        return self._tensors.data(weight.name)

    def copy_rows(self, moves: Sequence[tuple[int, int, int]]) -> None:
        for region in self.regions.values():
            for side in (region.k, region.v):
                rows = side.reshape(region.n_cells, region.row_bytes)
                for source, target, count in moves:
                    rows[target : target + count] = rows[source : source + count].copy()

    def memory(self) -> tuple[int, int] | None:
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        except (ValueError, OSError):
            return None

    def synchronize(self) -> None:
        pass  # a run returns when it is done

    def close(self) -> None:
        self.regions.clear()
        self._tensors = None
