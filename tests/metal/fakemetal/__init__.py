"""`objc`, `Metal` and `Foundation` as PyObjC gives them on a Mac: Apple's API contract over the software Metal device.

Whatever a Mac would reject, or silently get wrong, is a `ContractError` here.
"""

from .contract import Contract, ContractError
from .install import installed
from .runtime import Faults, Runtime

__all__ = ["Contract", "ContractError", "Faults", "Runtime", "installed"]
