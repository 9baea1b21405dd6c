"""Apple's API contract as data: which selectors an object answers, what each argument must be, since which macOS."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data" / "metal_contract.json.gz"

Version = tuple[int, ...]


class ContractError(AssertionError):
    """The code under test did what a Mac would reject, crash at, or silently get wrong."""


@dataclass(frozen=True)
class Argument:
    """`kind` is the Objective-C type encoding, `declared` the C type, `mode` n (in), o (out) or none."""

    kind: str
    declared: str
    mode: str


@dataclass(frozen=True)
class Method:
    owner: str
    selector: str
    arguments: tuple[Argument, ...]
    returns: str
    declared: str
    class_method: bool
    since: Version
    deprecated: Version | None

    @property
    def name(self) -> str:
        return f"{'+' if self.class_method else '-'}[{self.owner} {self.selector}]"


class Constant(int):
    """A value of Metal's enumerations that remembers its names; `|` makes a set of flags."""

    names: frozenset[str]

    def __new__(cls, value: int, names: frozenset[str]) -> Constant:
        self = super().__new__(cls, value)
        self.names = names
        return self

    def __or__(self, other: int) -> Constant:
        return Constant(int(self) | int(other), self.names | getattr(other, "names", frozenset({f"{other}"})))


#: Methods of every object that the contract, which lists Metal's own, leaves out.
NSOBJECT = {
    "retainCount": ((), "Q", "NSUInteger"),
    "respondsToSelector:": ((Argument(":", "SEL", ""),), "Z", "BOOL"),
    "release": ((), "v", "void"),
    "retain": ((), "@", "id"),
    "description": ((), "@", "NSString *"),
}
NSERROR = {
    "localizedDescription": ((), "@", "NSString *"),
    "domain": ((), "@", "NSString *"),
    "code": ((), "q", "NSInteger"),
    "userInfo": ((), "@", "NSDictionary *"),
}
NSURL = {"fileURLWithPath:": ((Argument("@", "NSString *", ""),), "@", "NSURL *"), "path": ((), "@", "NSString *")}

#: Classes that the contract leaves out, from Apple's headers: PyObjC needs no more than their selectors.
_SAMPLES, _INDEX = "id<MTLCounterSampleBuffer>", Argument("Q", "NSUInteger", "")
_ATTACHMENT = "MTLComputePassSampleBufferAttachmentDescriptor"
PASS_ATTACHMENTS = {
    f"{_ATTACHMENT}Array": {"objectAtIndexedSubscript:": ((_INDEX,), "@", f"{_ATTACHMENT} *")},
    _ATTACHMENT: {
        "setSampleBuffer:": ((Argument("@", _SAMPLES, ""),), "v", "void"),
        "setStartOfEncoderSampleIndex:": ((_INDEX,), "v", "void"),
        "setEndOfEncoderSampleIndex:": ((_INDEX,), "v", "void"),
    },
}

#: Constants that came after the oldest macOS minfer runs on.
CONSTANT_SINCE: dict[str, Version] = {
    "MTLLanguageVersion3_2": (15,),
    "MTLLanguageVersion4_0": (26,),
    "MTLGPUFamilyApple10": (26,),
    "MTLGPUFamilyMetal4": (26,),
}

#: Arguments that may be nil: (selector, index).
NULLABLE = {
    ("newLibraryWithSource:options:error:", 1),
    ("setBuffer:offset:atIndex:", 0),
    ("setLabel:", 0),
    ("setOutputURL:", 0),
    ("setComputeFunction:", 0),
}


def version(text: str | None) -> Version:
    return plain(tuple(map(int, text.split(".")))) if text else (0,)


def plain(number: Version) -> Version:
    """Without zeros at the end, so that 15 and 15.0 are the same."""
    while len(number) > 1 and not number[-1]:
        number = number[:-1]
    return number


@cache
def _data() -> dict[str, Any]:
    with gzip.open(DATA) as stream:
        data: dict[str, Any] = json.load(stream)
    return data


class Contract:
    """Lookups in the contract."""

    def __init__(self) -> None:
        data = _data()
        self.owners: dict[str, Any] = data["owners"]
        self.enums: dict[str, int] = data["enums"]
        self._found: dict[tuple[str, str], Method | None] = {}

    def constant(self, name: str) -> Constant | None:
        return Constant(self.enums[name], frozenset({name})) if name in self.enums else None

    def conforms(self, owner: str, wanted: str) -> bool:
        """Whether an object of `owner` is a `wanted`: itself, or one it inherits from."""
        if owner == wanted or wanted in ("id", "NSObject"):
            return True
        return any(self.conforms(s, wanted) for s in self.owners.get(owner, {}).get("super", ()))

    def is_class(self, name: str) -> bool:
        return name == "NSURL" or self.owners.get(name, {}).get("kind") == "class"

    def method(self, owner: str, selector: str) -> Method | None:
        """The method of an object of `owner`, or None where no version of Metal has it."""
        key = (owner, selector)
        if key not in self._found:
            self._found[key] = self._look_up(owner, selector)
        return self._found[key]

    def _look_up(self, owner: str, selector: str) -> Method | None:
        extra = {"NSError": NSERROR, "NSURL": NSURL, **PASS_ATTACHMENTS}.get(owner, {})
        for table in (extra, NSOBJECT):
            if selector in table:
                arguments, returns, declared = table[selector]
                static = selector == "fileURLWithPath:"
                return Method(owner, selector, arguments, returns, declared, static, (10,), None)
        found = self.owners.get(owner)
        if found is None:
            return None
        if selector in found["methods"]:
            m = found["methods"][selector]
            arguments = tuple(Argument(a["t"], a["tn"], a.get("mod", "")) for a in m["args"])
            gone = version(m["deprecated"]) if m["deprecated"] else None
            ret = m["ret"]
            return Method(owner, selector, arguments, ret["t"], ret["tn"], m["class_method"], version(m["macos"]), gone)
        for parent in found.get("super", ()):
            if above := self.method(parent, selector):
                return above
        return None

    def enum_prefixes(self, declared: str) -> tuple[str, ...] | None:
        """How constants of an enumeration start; None where the type is a plain number."""
        if declared == "MTLResourceOptions":
            return (
                "MTLResourceStorageMode",
                "MTLResourceCPUCacheMode",
                "MTLResourceHazardTracking",
                "MTLResourceOption",
            )
        return (declared,) if any(name.startswith(declared) for name in self.enums) else None

    def check_enum(self, what: str, declared: str, value: int) -> None:
        prefixes = self.enum_prefixes(declared)
        if prefixes is None:
            return
        if isinstance(value, Constant):
            if not all(name.startswith(prefixes) for name in value.names):
                raise ContractError(f"{what}: {', '.join(sorted(value.names))} is no {declared}")
            return
        members = [v for name, v in self.enums.items() if name.startswith(prefixes)]
        every = 0
        for member in members:
            every |= member
        if value not in members and (value & ~every or not declared.endswith(("Options", "Usage", "Scope"))):
            raise ContractError(f"{what}: {value} is no {declared}")
