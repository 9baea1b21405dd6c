"""What every back end does to the tokens: a list of replaced ranges, and printing the rest with its lines kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .unit import SPACES, FunctionConstant, ThreadgroupVar, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .lexer import Token

_FLOAT = re.compile(r"(?P<digits>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)(?P<suffix>[fFhH]|bf|BF)?")
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{1,4}")
_ASSIGN = frozenset(["=", "+=", "-=", "*=", "/=", "&=", "|=", "^="])
_TYPE_KEYWORDS = frozenset(
    ["bool", "char", "short", "int", "long", "float", "half", "unsigned", "signed", "auto", "uint", "ushort", "uchar"]
)
Value = bool | int | float
Place = tuple[str, int]


def constant_text(constant: FunctionConstant, value: Value) -> str:
    """A function constant's value as C++ text; raises ValueError where the value is not of its type."""
    if constant.type == "bool":
        return "true" if value else "false"
    if constant.type in ("float", "half", "bfloat"):
        number = float(value)
        text = (
            "NAN"
            if number != number
            else ("-" if number < 0 else "") + "INFINITY"
            if abs(number) == float("inf")
            else f"{number!r}"
        )
        return f"({constant.type})({text}{'' if text[-1].isalpha() else 'f'})"
    if isinstance(value, float) and value != int(value):
        raise ValueError(f"function constant {constant.name!r} is of type {constant.type}; {value!r} is not")
    return f"({constant.type})({int(value)}ll)"


class Emitter:
    """Collects replacements over one unit for one set of constant values, then prints.

    A subclass says how a kernel, a threadgroup variable and an attribute-free signature look in its language.
    """

    kernel_word = "static"
    keeps_instantiations = False

    def __init__(self, unit: Unit, constants: Mapping[str, Value]) -> None:
        self.unit, self.tokens, self.values = unit, unit.tokens, constants
        self.edits: dict[int, tuple[int, str]] = {}
        self._collect()

    # ---- to be said by a back end

    def threadgroup_text(self, variables: list[ThreadgroupVar]) -> str:
        """The replacement of one threadgroup declaration statement."""
        raise NotImplementedError

    def unroll_text(self, pragma: str) -> str:
        """The replacement of an unroll pragma that stands before a loop; '' drops it."""
        return ""

    def arm_text(self, other: str) -> str:
        """What opens an arm of `c ? a : b` whose other arm is `other`, where the arms need equal types."""
        raise NotImplementedError

    # ---- edits

    def replace(self, start: int, end: int, text: str) -> None:
        """Print `text` instead of the tokens `start`..`end`."""
        self.edits[start] = (end, text)

    def _collect(self) -> None:
        unit, tokens = self.unit, self.tokens
        for start, end in () if self.keeps_instantiations else unit.removed:
            self.replace(start, end, "")
        for (start, end), c in zip(unit.constant_decls, unit.constants.values(), strict=True):
            value = constant_text(c, self.values[c.name]) if c.name in self.values else f"{c.type}()"
            self.replace(start, end, f"static MSL_FN {c.type} {c.name}() {{ return {value}; }}")
        for kernel in unit.kernels.values():
            groups: dict[int, list[ThreadgroupVar]] = {}
            for v in kernel.threadgroup:
                groups.setdefault(v.start, []).append(v)
            for start, variables in groups.items():
                self.replace(start, variables[0].end, self.threadgroup_text(variables))
        functions = set(unit.constants) | {d[0] for d in unit.derived}
        derived_names = {d[2][1] for d in unit.derived}
        for name, (start, end), kind, init in unit.derived:
            words = [
                t.text for t in tokens[kind[0] : kind[1]] if t.text not in ("constant", "const", "static", "constexpr")
            ]
            self.replace(start, init[0], f"static MSL_FN {' '.join(words)} {name}() {{ return")
            self.replace(end - 1, end, "; }")
        i, n = 0, len(tokens)
        while i < n:
            if i in self.edits:
                i = self.edits[i][0]
                continue
            t = tokens[i]
            if t.kind == "id":
                self._identifier(i, t, functions, derived_names)
            elif t.kind == "num":
                self._number(i, t)
            elif t.text == "[" and i + 1 < n and tokens[i + 1].text == "[" and not tokens[i + 1].space:
                self.replace(i, self._attribute_end(i), "")
            elif t.text == "=" and i + 3 < n and tokens[i + 1].text == "{" and tokens[i + 2].text == "[":
                self._range_designator(i)
            elif t.kind == "pragma":
                self.replace(i, i + 1, self._pragma(i, t))
            i = self.edits[i][0] if i in self.edits else i + 1

    def _identifier(self, i: int, t: Token, functions: set[str], derived: set[int]) -> None:
        text = t.text
        before = self.tokens[i - 1] if i else t
        if text in SPACES:
            if text == "constant":
                neighbours = (before.text, self.tokens[i + 1].text if i + 1 < len(self.tokens) else "")
                near_constexpr = "constexpr" in neighbours or (
                    neighbours[0] == "static" and self.tokens[i - 2].text == "constexpr"
                )
                self.replace(i, i + 1, "" if "const" in neighbours or near_constexpr else "const")
            else:
                self.replace(i, i + 1, "")
        elif text == "kernel":
            self.replace(i, i + 1, self.kernel_word)
        elif text == "is_function_constant_defined" and self.tokens[i + 1].text == "(":
            name = self.tokens[i + 2].text
            if name not in self.unit.constants or self.tokens[i + 3].text != ")":
                raise t.error("is_function_constant_defined takes the name of a function constant")
            self.replace(i, i + 4, "true" if name in self.values else "false")
        elif before.text in (".", "->"):
            if _SWIZZLE.fullmatch(text) and text not in self.unit.members and self.tokens[i + 1].text != "(":
                self._swizzle(i, text)
        elif text in functions and i not in derived and before.text != "::":
            if before.kind == "id" and (before.text in _TYPE_KEYWORDS or self._is_type_name(before.text)):
                raise t.error(f"{text!r} hides a function constant; use another name")
            self.replace(i, i + 1, f"{text}()")

    def _is_type_name(self, text: str) -> bool:
        return any(text == name for name, _, _ in self.unit.types)

    def _swizzle(self, i: int, text: str) -> None:
        letters = "xyzw" if text[0] in "xyzw" else "rgba"
        if len(text) == 1:
            self.replace(i, i + 1, "xyzw"["rgba".index(text)])
            return
        picks = ", ".join(str(letters.index(c)) for c in text)
        call = "ref" if self.tokens[i + 1].text in _ASSIGN else "sw"
        self.replace(i, i + 1, f"template {call}<{picks}>()")

    def _number(self, i: int, t: Token) -> None:
        text = t.text.replace("'", "")
        m = _FLOAT.fullmatch(text)
        if not m or text.isdigit():
            if text[-1:] in "lL" and "." in text:
                raise t.error(f"{t.text}: there is no double in Metal")
            return
        digits, suffix = m["digits"], (m["suffix"] or "f").lower()
        if digits.isdigit():
            digits += "."
        kind = {"h": "half", "bf": "bfloat"}.get(suffix)
        self.replace(i, i + 1, f"(({kind}){digits}f)" if kind else f"{digits}f")

    def _attribute_end(self, i: int) -> int:
        depth = 0
        while True:
            depth += {"[": 1, "]": -1}.get(self.tokens[i].text, 0)
            i += 1
            if depth == 0:
                return i

    def _range_designator(self, i: int) -> None:
        """`T a[N] = {[0 ... N - 1] = v};` is a GNU extension that not every C++ compiler takes: it becomes a loop."""
        end = i + 1
        depth = 0
        dots = equals = -1
        while True:
            text = self.tokens[end].text
            depth += 1 if text in "([{" else -1 if text in ")]}" else 0
            if text == "..." and depth == 2:
                dots = end
            elif text == "=" and depth == 1 and equals < 0:
                equals = end
            elif text == "," and depth == 1 and self.tokens[end + 1].text != "}":
                return
            end += 1
            if depth == 0:
                break
        name = i
        while self.tokens[name - 1].text == "]":
            while self.tokens[name].text != "[":
                name -= 1
        while self.tokens[name].kind != "id" or self.tokens[name + 1].text != "[":
            name -= 1
        if dots > 0 and equals > 0:
            self.replace(i, equals + 1, f"; for (auto & msl_each : {self.tokens[name].text}) msl_each =")
            close = end - 2 if self.tokens[end - 2].text == "," else end - 1
            self.replace(close, end, "")

    def _pragma(self, i: int, t: Token) -> str:
        following = self.tokens[i + 1].text if i + 1 < len(self.tokens) else ""
        if "unroll" in t.text and following in ("for", "while", "do"):
            return self.unroll_text(t.text)
        return ""

    # ---- conditionals whose arms C++ cannot choose between, where Metal can

    def equal_arms(self, places: frozenset[Place]) -> None:
        """Open the arms of the conditionals at these places (file, line) with `arm_text`, and close them."""
        for i in range(len(self.tokens) - 1, -1, -1) if places else ():  # an inner one before the one around it
            t = self.tokens[i]
            if t.text == "?" and any(t.file == file and abs(t.line - line) <= 2 for file, line in places):
                self._equal_arms(i)

    def _equal_arms(self, question: int) -> None:
        colon = self._end(question + 1, (":",))
        end = self._end(colon + 1, (":", ",", ";"))
        first, second = self._printed(question + 1, colon), self._printed(colon + 1, end)
        opened = [self.arm_text(" ".join(self._text_at(i)[1] for i in arm)) for arm in (second, first)]
        for before, last, opening in ((question, first[-1], opened[0]), (colon, second[-1], opened[1])):
            if last == before + 1 and self.tokens[last].kind == "num" and self.tokens[last].text[-1] not in "hHF":
                continue  # a literal that is no half; 0 may be a null pointer
            self.replace(before, before + 1, f"{self.tokens[before].text} {opening}")
            stop, text = self._text_at(last)
            self.replace(last, stop, f"{text} )")

    def _end(self, i: int, marks: tuple[str, ...]) -> int:
        """The next of `marks` (a colon that belongs to no inner conditional), or the bracket that closes around it."""
        depth = inner = 0
        while True:
            text = self.tokens[i].text
            depth += 1 if text in ("(", "[", "{") else -1 if text in (")", "]", "}") else 0
            if depth < 0 or (depth == 0 and text in marks and not (text == ":" and inner)):
                return i
            inner += depth == 0 and (text == "?") - (text == ":")
            i += 1

    def _text_at(self, i: int) -> tuple[int, str]:
        return self.edits.get(i, (i + 1, self.tokens[i].text))

    def _printed(self, start: int, end: int) -> list[int]:
        """Where the tokens that will be printed begin."""
        out = []
        while start < end:
            out.append(start)
            start = self._text_at(start)[0]
        return out

    # ---- printing

    def text(self, start: int = 0, end: int | None = None) -> str:
        """The tokens `start`..`end` with their replacements, and #line where the place jumps."""
        tokens, edits = self.tokens, self.edits
        out: list[str] = []
        file, line = "", -1
        i, n = start, len(tokens) if end is None else end
        while i < n:
            t = tokens[i]
            if i in edits:
                j, text = edits[i]
            else:
                j, text = i + 1, t.text
            if text:
                if t.file != file or not 0 <= t.line - line <= 3:
                    name = t.file.replace("\\", "/").replace('"', "'")
                    out.append(f'\n#line {t.line} "{name}"\n')
                    file, line = t.file, t.line
                elif t.line != line:
                    out.append("\n" * (t.line - line))
                    line = t.line
                elif t.space or t.kind in ("id", "num"):
                    out.append(" ")
                if text.startswith("#"):
                    out.append(f"\n{text}\n")
                    line = -1
                else:
                    out.append(text)
            i = j
        return "".join(out)
