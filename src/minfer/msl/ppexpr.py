"""Integer constant expressions: `#if` conditions, binding indices, array sizes written as literals."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .errors import SourceError
    from .lexer import Token

_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_INT = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uUlL]*")


def evaluate(tokens: list[Token], head: Token, names: Mapping[str, int] | None = None) -> int:
    """The value of an integer expression. Unknown names are 0 in an `#if` (names=None) and an error elsewhere.

    Raises SourceError at `head` when the tokens are no such expression.
    """
    parser = _Parser(tokens, head, names)
    value = parser.ternary()
    if parser.pos != len(parser.texts):
        raise head.error(f"unexpected {parser.texts[parser.pos]!r} in a constant expression")
    return value


class _Parser:
    def __init__(self, tokens: list[Token], head: Token, names: Mapping[str, int] | None) -> None:
        self.head, self.names, self.pos, self.depth = head, names, 0, 0
        self.texts: list[str] = []
        for t in tokens:
            if t.text == ">" and self.texts and self.texts[-1] == ">" and not t.space:
                self.texts[-1] = ">>"
            else:
                self.texts.append(t.text)

    def fail(self, what: str) -> SourceError:
        return self.head.error(what)

    def peek(self) -> str:
        return self.texts[self.pos] if self.pos < len(self.texts) else ""

    def ternary(self) -> int:
        self.depth += 1
        if self.depth > 40:
            raise self.fail("constant expression is nested too deep")
        condition = self.binary(0)
        if self.peek() == "?":
            self.pos += 1
            yes = self.ternary()
            if self.peek() != ":":
                raise self.fail("'?' without ':' in a constant expression")
            self.pos += 1
            no = self.ternary()
            condition = yes if condition else no
        self.depth -= 1
        return condition

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            op = self.peek()
            self.pos += 1
            left = self.apply(op, left, self.binary(level + 1))
        return left

    def apply(self, op: str, a: int, b: int) -> int:
        if op in ("/", "%"):
            if b == 0:
                return 0  # the branch not taken of `x && 1 / x`; a true division by zero has no use here
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return quotient if op == "/" else a - b * quotient
        if op in ("<<", ">>"):
            if not 0 <= b < 64:
                raise self.fail(f"shift by {b} in a constant expression")
            return (a << b) & (2**64 - 1) if op == "<<" else a >> b
        table = {
            "||": int(bool(a) or bool(b)),
            "&&": int(bool(a) and bool(b)),
            "|": a | b,
            "^": a ^ b,
            "&": a & b,
            "+": a + b,
            "-": a - b,
            "*": a * b,
            "==": int(a == b),
            "!=": int(a != b),
            "<": int(a < b),
            ">": int(a > b),
            "<=": int(a <= b),
            ">=": int(a >= b),
        }
        return table[op]

    def unary(self) -> int:
        t = self.peek()
        self.pos += 1
        if t in ("!", "-", "+", "~"):
            v = self.unary()
            return {"!": int(not v), "-": -v, "+": v, "~": ~v}[t]
        if t == "(":
            value = self.ternary()
            if self.peek() != ")":
                raise self.fail("'(' without ')' in a constant expression")
            self.pos += 1
            return value
        m = _INT.fullmatch(t.replace("'", ""))
        if m:
            digits = m.group(1)
            octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
            return (
                int(digits, 8 if octal and not set(digits) & set("89") else 10) if digits.isdigit() else int(digits, 0)
            )
        if t in ("true", "false"):
            return int(t == "true")
        if t and (t[0].isalpha() or t[0] == "_"):
            if self.names is None:
                return 0
            if t in self.names:
                return self.names[t]
        raise self.fail(f"{t or 'nothing'!r} in a constant expression")
