"""The third back end: C++ for OpenCL, which knows address spaces, for a compiler to look at and never to run.

Metal's spaces become OpenCL's: threadgroup is local, thread is private. Device and constant are two parts of OpenCL's
global space that have no pointer in common; its own constant space would not do, since no class can be copied from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cursor import Cursor
from .emit import Emitter, Place, Value
from .unit import SPACES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .lexer import Token
    from .unit import ThreadgroupVar, Unit

_WORDS = {"device": "MSL_DEVICE", "threadgroup": "__local", "thread": "__private"}


class SpacesEmitter(Emitter):
    """Kernels become plain functions, and templates are instantiated as the source asks.

    A constant at program scope must lie in the global space itself; an array among them is read through `in_constant`,
    so that a pointer to it is one to constant memory. A template's pointer to a function becomes a reference, which has
    no space. `conditionals` are places whose arms must be values: a class in private memory and a temporary one have no
    common type here.
    """

    kernel_word = ""
    keeps_instantiations = True

    def __init__(
        self, unit: Unit, constants: Mapping[str, Value], conditionals: frozenset[Place] = frozenset()
    ) -> None:
        self.tables: set[str] = set()
        self.cursor = Cursor(unit)
        super().__init__(unit, constants)
        self._instantiate_once()
        self.equal_arms(conditionals)

    def threadgroup_text(self, variables: list[ThreadgroupVar]) -> str:
        """References: OpenCL allows variables in local memory in its own kernels only, which cannot be templates."""
        out = []
        for v in variables:
            kind = " ".join(t.text for t in self.tokens[v.type[0] : v.type[1]])
            dims = " ".join(t.text for t in self.tokens[v.dims[0] : v.dims[1]])
            out.append(f"typedef {kind} msl_t{v.number} {dims}; __local msl_t{v.number} & {v.name} = ")
            out.append(f"*(__local msl_t{v.number} *)0;")
        return " ".join(out)

    def arm_text(self, other: str) -> str:
        """The arm as a value."""
        return "metal::value("

    def _instantiate_once(self) -> None:
        """Two host names may stand for one instantiation."""
        seen: set[str] = set()
        for start, end in self.unit.removed:
            words = self.unit.text((start, end)).partition("]]")[2]
            if words in seen:
                self.replace(start, end, "")
            seen.add(words)

    def _identifier(self, i: int, t: Token, functions: set[str], derived: set[int]) -> None:
        before = self.tokens[i - 1].text if i else ""
        if t.text in SPACES:
            self.replace(i, i + 1, _WORDS.get(t.text) or self._constant(i))
        elif t.text == "template" and self.tokens[i + 1].text == "<":
            self._function_parameters(i + 1)
        elif t.text in self.tables and before not in (".", "->", "::"):
            self.replace(i, i + 1, f"metal::in_constant({t.text})")
        else:
            super()._identifier(i, t, functions, derived)

    def _function_parameters(self, angle: int) -> None:
        """`R (*name)(...)` of a template's parameters becomes `R (&name)(...)`."""
        for start, end in self.cursor.split(angle + 1, self.cursor.angle_end(angle) - 1):
            for i in range(start, end):
                if [t.text for t in self.tokens[i : i + 2]] == ["(", "*"] and self.tokens[i + 3].text == ")":
                    self.replace(i + 1, i + 2, "&")
                    break

    def _constant(self, i: int) -> str:
        """The space of what a pointer or reference points to, or of a variable."""
        j = i + 1
        while self.tokens[j].kind == "id" or self.tokens[j].text in ("::", "<"):
            j = self.cursor.angle_end(j) if self.tokens[j].text == "<" else j + 1
        if self.tokens[j].text not in ("=", "[", ";", "{"):
            return "const MSL_CONSTANT"
        if self.tokens[j].text == "[":
            self.tables.add(self.tokens[j - 1].text)
            self.replace(j - 1, j, self.tokens[j - 1].text)
        return "const __global" if "static" in (t.text for t in self.tokens[i - 3 : i + 3]) else "static const __global"


def emit_spaces(unit: Unit, constants: Mapping[str, Value], conditionals: frozenset[Place] = frozenset()) -> str:
    """A translation unit with the address spaces of the source."""
    return f'#include "msl_spaces.h"\n{SpacesEmitter(unit, constants, conditionals).text()}\n'
