"""The fast CPU backend: a C++ core run from Python, one call a split.

Activations are quantized to 8 bits (blocks of 32) where a weight is in a block format, so results differ from f32
arithmetic by that rounding: `BOUNDS` states the class. Everything else is f32.
"""

from minfer.backends.cpu.backend import BOUNDS, CpuBackend
from minfer.backends.cpu.threads import default_threads

__all__ = ["BOUNDS", "CpuBackend", "default_threads"]
