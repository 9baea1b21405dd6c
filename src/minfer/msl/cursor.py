"""Walking over matched tokens: what the front end and the refusals share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import SourceError

if TYPE_CHECKING:
    from .lexer import Token
    from .unit import Unit

_CLOSE = {"(": ")", "[": "]", "{": "}"}


class Cursor:
    """The tokens of a unit with their brackets matched."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.tokens = unit, unit.tokens
        if not unit.pair:
            unit.pair = self._match_brackets()
        self.pair = unit.pair

    def _match_brackets(self) -> dict[int, int]:
        pair: dict[int, int] = {}
        stack: list[int] = []
        for i, t in enumerate(self.tokens):
            if t.kind != "op":
                continue
            if t.text in _CLOSE:
                stack.append(i)
            elif t.text in ")]}":
                if not stack or _CLOSE[self.tokens[stack[-1]].text] != t.text:
                    raise t.error(f"{t.text!r} closes nothing")
                pair[stack.pop()] = i
        if stack:
            raise self.tokens[stack[-1]].error(f"{self.tokens[stack[-1]].text!r} is never closed")
        return pair

    def text(self, i: int) -> str:
        """The text of a token; nothing outside the unit."""
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def is_attribute(self, i: int) -> bool:
        """Does an attribute list start here?"""
        return self.text(i) == "[" and self.text(i + 1) == "[" and not self.tokens[i + 1].space

    def angle_end(self, i: int) -> int:
        """Index after the `>` that closes the `<` at `i`."""
        depth, j = 0, i
        while j < len(self.tokens):
            t = self.text(j)
            if t == "<":
                depth += 1
            elif t == ">":
                depth -= 1
                if depth == 0:
                    return j + 1
            elif j in self.pair and t != "{":
                j = self.pair[j]
            elif t in (";", "{"):
                break
            j += 1
        raise self.tokens[i].error("'<' of a template argument list is never closed")

    def split(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split a range at its top-level commas; angle brackets count as brackets where they follow a name."""
        parts: list[tuple[int, int]] = []
        first = i = start
        while i < end:
            t = self.text(i)
            if i in self.pair:
                i = self.pair[i]
            elif t == "<" and self.tokens[i - 1].kind == "id":
                try:
                    close = self.angle_end(i)
                except SourceError:  # a comparison
                    close = i + 1
                i = (close if close <= end else i + 1) - 1
            elif t == ",":
                parts.append((first, i))
                first = i + 1
            i += 1
        if first < end or parts:
            parts.append((first, end))
        return parts

    def semicolon(self, i: int) -> int:
        """Index after the next `;` outside brackets."""
        start = i
        while i < len(self.tokens):
            if self.text(i) == ";":
                return i + 1
            i = self.pair.get(i, i) + 1
        raise self.tokens[start].error("declaration without ';'")

    def attributes(self, start: int, end: int) -> list[tuple[str, list[Token], Token]]:
        """(name, argument tokens, first token) of every attribute in a range."""
        found = []
        i = start
        while i < end:
            if not self.is_attribute(i):
                i += 1
                continue
            close = self.pair[i + 1]
            for a, b in self.split(i + 2, close):
                j = a
                name = ""
                while j < b and self.text(j) != "(":
                    name += self.text(j)
                    j += 1
                args = self.tokens[j + 1 : self.pair[j]] if j < b else []
                if j < b and self.pair[j] + 1 != b:
                    raise self.tokens[a].error(f"cannot read attribute {name}")
                found.append((name, args, self.tokens[a]))
            i = self.pair[i] + 1
        return found

    def names(self, start: int, end: int) -> frozenset[str]:
        """The identifiers of a range."""
        return frozenset(t.text for t in self.tokens[start:end] if t.kind == "id")
