"""The contract of a backend: memory, weights by name, KV regions, and splits compiled to programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from minfer.backends.profile import Profile
    from minfer.graph.allocate import Split
    from minfer.graph.ir import Node, Weight
    from minfer.graph.plan import Plan
    from minfer.quants import KvFormat

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int | None, str], None]
"""`progress(done, total, what)`: bytes so far, bytes in all, and a phrase for a person."""


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


Verdict = Literal["pass", "fail", "skip"]
Values = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Check:
    """Whether one thing holds that a device's code takes for granted: what was found, in words and in numbers."""

    name: str
    verdict: Verdict
    text: str
    values: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Seconds of a launch by the device's own clock."""

    node: str
    kernel: str
    seconds: float


class Program(Protocol):
    """A compiled split. Running it reads and writes only its plan's buffers and the KV regions."""

    def run(self) -> None: ...


class Backend(ABC):
    """A device that runs splits. Buffers are opaque to callers: they are read, written and copied through here.

    A backend belongs to one engine: it has the engine's weights, KV format and KV regions.
    """

    name: str
    regions: dict[int, KvRegion]
    profile: Profile | None = None  # where host time goes, if anyone asks
    runs_ahead: bool = False  # a program's `run` returns before the device is done
    chains: bool = False  # `fetch` waits for no later work: a step may be sent before the last one's result is read
    caveat: str = ""  # what a speed measured here does not say

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

    def fetch(self, buffer: Any, nbytes: int) -> Callable[[], Bytes]:
        """`read`, to be called for: of the buffer as it is after all work submitted so far, whatever comes then."""
        data = self.read(buffer, nbytes)
        return lambda: data

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        """Copy the first `nbytes` bytes of a buffer to another of this backend, after all submitted work. A device with
        its own order of work need not wait for it: so the id that one step chose feeds the next."""
        self.write(target, self.read(source, nbytes))

    @abstractmethod
    def load_weights(self, tensors: Tensors, weights: Sequence[Weight], progress: Progress | None = None) -> None:
        """Make the weights that this device's nodes name reachable; called once, before `compile`. `progress` is told
        of copies to a device's own memory."""

    @abstractmethod
    def weight_bytes(self, weight: Weight) -> int:
        """Bytes of device memory that `weight` takes beyond the mapped file."""

    def scratch_bytes(self, plan: Plan, n_cells: int) -> int:
        """Bytes that `plan`, and steps of fewer tokens, take beyond values, weights and KV rows of `n_cells`."""
        return 0

    def add_kv_region(self, layer: int, n_cells: int, n_values: int, kv_format: KvFormat) -> KvRegion:
        """Reserve the KV rows of a layer."""
        row_bytes = kv_format.row_bytes(n_values)
        k, v = (self.allocate(n_cells * row_bytes, f"{side} rows of layer {layer}") for side in "KV")
        region = KvRegion(layer, n_cells, n_values, row_bytes, k, v)
        self.regions[layer] = region
        return region

    @abstractmethod
    def compile(self, plan: Plan, split: Split, buffers: Callable[[int], Any]) -> Program:
        """Turn a split of a plan into a program; `buffers` gives the buffer of a value (node index) on this device."""

    def launches(self, plan: Plan, split: Split) -> LaunchList | None:
        """The launches of a split; None where the device runs it in another way. Takes no memory."""
        return None

    def prepare(self, listed: Iterable[LaunchList]) -> int:
        """Compile the kernels of many splits together, where that is cheaper than one by one; how many variants."""
        return 0

    def bound(self, node: Node, kind: str, f32: float) -> float:
        """Largest error (`cases.error`) of a node here; `kind` is its class in `cases`, `f32` the class's own bound."""
        return f32

    def facts(self) -> dict[str, str]:
        """What this device is, for a report: processor, versions, limits. Nothing that tells whose machine it is."""
        return {}

    def checks(self, *, risky: bool) -> Iterator[Check]:
        """What this device's code takes for granted, tried; `risky` also what may take the system down with it."""
        return iter(())

    def launch_times(self, program: Program) -> list[LaunchTime]:
        """Run a program once more, its inputs as they are, and time each launch. `UnsupportedError` says why not."""
        raise UnsupportedError(f"{self.name} has no clock for single launches")

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
