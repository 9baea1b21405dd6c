"""The list of op cases. Tests, `bench --ops` and `doctor` run the same list on every backend.

A case is a small graph and its data; the reference backend's result is what others are compared with. `kind` names
the tolerance class: a backend states a bound for each (`BOUNDS` is for f32 arithmetic), and `exact` means bit for bit.
"""

from minfer.cases.case import BOUNDS, Array, Case, Kind, KvFill, MemoryTensors, Value, error, random_rows
from minfer.cases.ops import all_cases, causal, windowed
from minfer.cases.run import Opened, run

__all__ = [
    "BOUNDS",
    "Array",
    "Case",
    "Kind",
    "KvFill",
    "MemoryTensors",
    "Opened",
    "Value",
    "all_cases",
    "causal",
    "error",
    "random_rows",
    "run",
    "windowed",
]
