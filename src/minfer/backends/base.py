"""The contract of a backend: memory, weights by name, KV regions, and splits compiled to programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minfer.backends.profile import Profile
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan
    from minfer.quants import KvFormat

Bytes = npt.NDArray[np.uint8]


class Tensors(Protocol):
    """The open model: raw bytes of a tensor, `(n_rows, row_bytes)`, a view of the mapped file."""

    def data(self, name: str) -> Bytes: ...


@dataclass(frozen=True, slots=True)
class KvRegion:
    """K and V rows of one layer: `n_cells` rows of `row_bytes` bytes each, `n_values` numbers a row."""

    layer: int
    n_cells: int
    n_values: int
    row_bytes: int
    k: Any
    v: Any


class LaunchList(Protocol):
    """What a split launches, for looking at."""

    def table(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class Program(Protocol):
    """A compiled split. Running it reads and writes only its plan's buffers and the KV regions."""

    def run(self) -> None: ...


class Backend(ABC):
    """A device that runs splits. Buffers are opaque to callers: they are read, written and copied through here.

    A backend belongs to one engine: it has the engine's weights, KV format and KV regions.
    """

    name: str
    profile: Profile | None = None  # where host time goes, if anyone asks

    @abstractmethod
    def supports(self, node: Node) -> str | None:
        """None if `node` runs here as it is, else what is missing: op, dtype, kernel or limit."""

    @abstractmethod
    def allocate(self, nbytes: int, label: str) -> Any:
        """A zeroed buffer of at least `nbytes` bytes. Raises `DeviceMemoryError` with both numbers."""

    @abstractmethod
    def free(self, buffer: Any) -> None: ...

    @abstractmethod
    def write(self, buffer: Any, data: npt.NDArray[Any]) -> None:
        """Copy `data` to the start of a buffer."""

    @abstractmethod
    def read(self, buffer: Any, nbytes: int) -> Bytes:
        """A copy of the first `nbytes` bytes of a buffer, after all submitted work."""

    def view(self, buffer: Any, nbytes: int) -> Bytes:
        """As `read`; where buffers are host memory, the bytes themselves, which the next run changes."""
        return self.read(buffer, nbytes)

    @abstractmethod
    def load_weights(self, tensors: Tensors, weights: Sequence[Weight]) -> None:
        """Make the weights that this device's nodes name reachable; called once, before `compile`."""

    @abstractmethod
    def weight_bytes(self, weight: Weight) -> int:
        """Bytes of device memory that `weight` takes beyond the mapped file."""

    @abstractmethod
    def add_kv_region(self, layer: int, n_cells: int, n_values: int, kv_format: KvFormat) -> KvRegion:
        """Reserve the KV rows of a layer."""

    @abstractmethod
    def compile(self, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> Program:
        """Turn a split of a plan into a program; `buffers` gives the buffer of a value (node index) on this device."""

    def launches(self, plan: Plan, split: Split) -> LaunchList | None:
        """The launches of a split; None where the device runs it in another way. Takes no memory."""
        return None

    @abstractmethod
    def copy_rows(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move KV rows of every layer verbatim: `(from cell, to cell, count)`, each overlap-safe, in order."""

    @abstractmethod
    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device, or None where it cannot be told."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return after all submitted work is done."""

    @abstractmethod
    def close(self) -> None:
        """Free everything at once; the backend is not used again."""
