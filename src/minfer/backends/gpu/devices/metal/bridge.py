"""The way to Apple's frameworks, and what PyObjC must be told about them.

A selector's `:` is spelled `_`; an out-parameter is passed as None and comes back in a tuple; properties are methods.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

from minfer.backends.gpu.kernels import origin
from minfer.errors import UnsupportedError

#: Oldest macOS: MSL 3.1.
MACOS = (14, 0)

#: Instance methods whose result the caller owns. PyObjC up to 12.2.2 does not know and keeps one reference too many;
#: registering replaces all that it knows of the method, so out-parameters and arrays are told again.
_OWNED: dict[bytes, dict[int, dict[str, Any]]] = {
    b"newCommandQueue": {},
    b"newSharedEvent": {},
    b"newBufferWithLength:options:": {2: {"type": b"Q"}, 3: {"type": b"Q"}},
    b"newBufferWithBytesNoCopy:length:options:deallocator:": {
        2: {"type": b"^v", "type_modifier": b"n", "c_array_length_in_arg": 3},
        3: {"type": b"Q"},
        4: {"type": b"Q"},
        5: {
            "type": b"@?",
            "callable": {
                "retval": {"type": b"v"},
                "arguments": {0: {"type": b"^v"}, 1: {"type": b"^v"}, 2: {"type": b"Q"}},
            },
        },
    },
    b"newLibraryWithSource:options:error:": {
        2: {"type": b"@"},
        3: {"type": b"@"},
        4: {"type": b"^@", "type_modifier": b"o"},
    },
    b"newFunctionWithName:constantValues:error:": {
        2: {"type": b"@"},
        3: {"type": b"@"},
        4: {"type": b"^@", "type_modifier": b"o"},
    },
    b"newComputePipelineStateWithDescriptor:options:reflection:error:": {
        2: {"type": b"@"},
        3: {"type": b"Q"},
        4: {"type": b"^@"},
        5: {"type": b"^@", "type_modifier": b"o"},
    },
    b"newIndirectCommandBufferWithDescriptor:maxCommandCount:options:": {
        2: {"type": b"@"},
        3: {"type": b"Q"},
        4: {"type": b"Q"},
    },
    b"newCounterSampleBufferWithDescriptor:error:": {2: {"type": b"@"}, 3: {"type": b"^@", "type_modifier": b"o"}},
    b"newResidencySetWithDescriptor:error:": {2: {"type": b"@"}, 3: {"type": b"^@", "type_modifier": b"o"}},
}


@cache
def frameworks() -> tuple[Any, Any, Any]:
    """The modules `objc`, `Metal` and `Foundation`, with ownership told. Raises `UnsupportedError` with the reason."""
    try:
        import Foundation
        import Metal
        import objc
    except ImportError as error:
        what = (
            "Metal is reached through PyObjC: pip install pyobjc-framework-Metal"
            if sys.platform == "darwin"
            else "Metal runs on a Mac with Apple silicon; here, use another device (`auto` picks one)"
        )
        raise UnsupportedError(f"device metal: {error}. {what}") from error
    if not objc.macos_available(*MACOS):
        raise UnsupportedError(f"device metal needs macOS {MACOS[0]} or later, for its shading language 3.1")
    for selector, arguments in _OWNED.items():
        metadata = {"retval": {"type": b"@", "already_retained": True}, "arguments": arguments}
        objc.registerMetaDataForSelector(b"NSObject", selector, metadata)
    return objc, Metal, Foundation


def error_text(error: Any) -> str:
    """What Metal said, with its code."""
    return (
        "Metal gives no reason"
        if error is None
        else f"{error.localizedDescription()} ({error.domain()} {error.code()})"
    )


def compiler_text(family: str, error: Any) -> str:
    """The compiler's lines, with our files in place of the text that it was given."""
    return re.sub(r"program_source:(\d+)", lambda found: origin(family, int(found[1])), error_text(error))
