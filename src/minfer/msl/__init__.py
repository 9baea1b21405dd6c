"""The Metal Shading Language off the Mac: a translator to C++ and a software Metal device.

`Library(source).kernel(name, constants)(groups, threads, *buffers)` runs a Metal kernel on numpy arrays.
"""

from .checks import Binding, CheckError, Counters, Finding, Report
from .errors import CompileError, LaunchError, MslError, SourceError, ToolError
from .library import Argument, Kernel, Library

__all__ = [
    "Argument",
    "Binding",
    "CheckError",
    "CompileError",
    "Counters",
    "Finding",
    "Kernel",
    "LaunchError",
    "Library",
    "MslError",
    "Report",
    "SourceError",
    "ToolError",
]
