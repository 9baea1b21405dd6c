"""What Apple's compiler refuses and a C++ compiler would let through, found in the tokens.

The checks are lexical: they see declarations and names, not types. Each says its own reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cursor import Cursor
from .unit import SPACES, Function, Kernel, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lexer import Token

_WORDS = {
    "double": "there is no double in Metal; use float",
    "goto": "goto is not part of Metal",
    "try": "exceptions are not part of Metal",
    "catch": "exceptions are not part of Metal",
    "throw": "exceptions are not part of Metal",
    "new": "new is not part of Metal: kernels do not allocate",
    "delete": "delete is not part of Metal: kernels do not allocate",
    "dynamic_cast": "dynamic_cast is not part of Metal",
    "typeid": "typeid is not part of Metal",
    "virtual": "virtual functions are not part of Metal",
    "thread_local": "thread_local is not part of Metal",
    "register": "register is not part of Metal",
    "asm": "inline assembly is not part of Metal",
    "__asm__": "inline assembly is not part of Metal",
    "wchar_t": "wchar_t is not part of Metal",
    "std": "the C++ standard library is not part of Metal",
}
_QUALIFIERS = frozenset(
    ["const", "volatile", "constexpr", "static", "inline", "typename", "unsigned", "signed", "struct", "mutable"]
)
_STATEMENT = frozenset([";", "{", "}"])
_SCALAR_BYTES = {
    "bool": 1,
    "char": 1,
    "uchar": 1,
    "int8_t": 1,
    "uint8_t": 1,
    "short": 2,
    "ushort": 2,
    "half": 2,
    "bfloat": 2,
    "int16_t": 2,
    "uint16_t": 2,
    "int": 4,
    "uint": 4,
    "float": 4,
    "int32_t": 4,
    "uint32_t": 4,
    "long": 8,
    "ulong": 8,
    "int64_t": 8,
    "uint64_t": 8,
}
MAX_THREADGROUP_BYTES = 32768


def refuse(unit: Unit) -> None:
    """Raise SourceError at the first thing that Metal does not allow."""
    _Refuser(unit).run()


class _Refuser(Cursor):
    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self.constants = set(unit.constants) | {d[0] for d in unit.derived}

    def run(self) -> None:
        self.words()
        for start, end in self.unit.variables:
            self.program_scope(start, end)
        for f in self.functions():
            self.parameters(f)
            self.statics(f)
            self.spaces(f)
        for _, brace, end in self.unit.types:
            self.pointers(brace + 1, end)
        self.recursion()
        for kernel in self.unit.kernels.values():
            self.threadgroup_size(kernel)
        self.constant_expressions()

    def functions(self) -> Iterator[Function | Kernel]:
        yield from self.unit.functions
        yield from self.unit.kernels.values()

    # ---- single words

    def words(self) -> None:
        for i, t in enumerate(self.tokens):
            if t.kind != "id":
                continue
            reason = _WORDS.get(t.text)
            before = self.text(i - 1)
            if reason and before not in (".", "->") and not (t.text == "delete" and before == "="):
                raise t.error(reason)
            if t.text == "long" and self.text(i + 1) == "long":
                raise t.error("long long is not part of Metal; long has 64 bits")
            if t.text in SPACES:
                self.space_word(i, t)

    def space_word(self, i: int, t: Token) -> None:
        j = i + 1
        while self.text(j) in SPACES or self.text(j) in _QUALIFIERS:
            if self.text(j) in SPACES and self.text(j) != t.text:
                raise t.error(f"two address spaces, {t.text} and {self.text(j)}, in one type")
            j += 1

    # ---- program scope

    def program_scope(self, start: int, end: int) -> None:
        words = [self.text(k) for k in range(start, end)]
        if "[" in words and words[:2] == ["[", "["]:
            return
        if "operator" in words or "(" in words[: words.index("=")] if "=" in words else "(" in words:
            return  # a prototype
        head = words[: words.index("=")] if "=" in words else words
        if "constant" in head or "extern" in head or "friend" in head or "template" in head:
            return
        names = [w for w in head if w.isidentifier()]
        if len(names) >= 2:
            raise self.tokens[start].error(
                f"program-scope variable {names[-1]!r} is not in the constant address space: "
                "threads share no mutable program-scope data"
            )

    # ---- pointers without an address space

    def parameters(self, f: Function | Kernel) -> None:
        start, end = f.sig
        self.parameter_list(start + 1, end - 1, f.name)
        self.pointers(f.body[0] + 1, f.body[1] - 1)

    def parameter_list(self, start: int, end: int, name: str) -> None:
        first = i = start
        while i <= end:
            if i == end or self.text(i) == ",":
                self.declarator(first, i, f"a parameter of {name!r}")
                first = i + 1
            elif self.text(i) == "...":
                if i + 1 == end and self.text(i - 1) in ("(", ","):
                    raise self.tokens[i].error(f"function {name!r} takes variable arguments, which Metal has not")
            elif i in self.pair:
                i = self.pair[i]
            elif self.text(i) == "<":
                i = self.angle(i) - 1
            i += 1

    def angle(self, i: int) -> int:
        """Index after the `>` that closes `<`, or after the `<` where it is a comparison."""
        depth, j = 0, i
        while j < len(self.tokens):
            t = self.text(j)
            if t == "<":
                depth += 1
            elif t == ">":
                depth -= 1
                if depth == 0:
                    return j + 1
            elif t in ("(", "["):
                j = self.pair[j]
            elif t in (";", "{", "}", ")", "&&", "||"):
                break
            j += 1
        return i + 1

    def declarator(self, start: int, end: int, what: str) -> None:
        """A declaration without its initializer: a top-level * or & needs a space before it."""
        i, space = start, False
        while i < end:
            t = self.text(i)
            if t in SPACES or t == "auto":
                space = True
            elif t == "=" or (i in self.pair and t != "["):
                return
            elif t in ("*", "&") and not space:
                kind = "pointer" if t == "*" else "reference"
                raise self.tokens[i].error(
                    f"{what} is a {kind} without an address space (device, constant, threadgroup or thread)"
                )
            elif t == "<":
                i = self.angle(i) - 1
            i += 1

    def pointers(self, start: int, end: int) -> None:
        """Local variables, members and casts."""
        for i in range(start, end):
            t = self.tokens[i]
            if t.text == "(" and self.text(self.pair[i] - 1) == "*":
                inner = [self.text(k) for k in range(i + 1, self.pair[i])]
                if (
                    all(w.isidentifier() or w in ("*", "::") for w in inner)
                    and not any(w in SPACES or w == "auto" for w in inner)
                    and inner[0] != "*"
                ):
                    raise t.error("a cast to a pointer without an address space")
            if t.kind != "id" or (
                self.text(i - 1) not in _STATEMENT and not (self.text(i - 1) == "(" and self.text(i - 2) == "for")
            ):
                continue
            j = i
            while self.text(j) in _QUALIFIERS:
                j += 1
            if (
                self.tokens[j].kind != "id"
                or self.text(j) in SPACES
                or self.text(j) in ("return", "auto", "else", "case", "using", "typedef", "delete")
            ):
                continue
            j += 1
            while self.text(j) in ("::", "<"):
                j = self.angle(j) if self.text(j) == "<" else j + 2
            while self.text(j) in ("const", "volatile"):
                j += 1
            star = self.text(j)
            if star in ("*", "&") and self.tokens[j + 1].kind == "id" and self.text(j + 2) in ("=", ";", ",", ":", "["):
                kind = "pointer" if star == "*" else "reference"
                raise t.error(
                    f"{self.text(j + 1)!r} is a {kind} without an address space "
                    "(device, constant, threadgroup or thread)"
                )

    # ---- the wrong address space passed on

    def spaces(self, f: Function | Kernel) -> None:
        known = self.signature(f)
        i, end = f.body
        by_name: dict[str, list[Function]] = {}
        for g in self.unit.functions:
            by_name.setdefault(g.name, []).append(g)
        while i < end:
            t = self.text(i)
            if t in SPACES and self.tokens[i].kind == "id":
                j = i + 1
                while self.tokens[j].kind == "id" or self.text(j) in ("::", "<"):
                    j = self.angle(j) if self.text(j) == "<" else j + 1
                if self.text(j) in ("*", "&"):
                    while self.text(j) in ("*", "&", "const"):
                        j += 1
                    if self.tokens[j].kind == "id":
                        if self.text(j + 1) == "=":
                            self.same_space(t, known, j + 2, end, f"{self.text(j)!r}")
                        known[self.text(j)] = t
                    elif self.text(j) == ")" and t != "thread":
                        self.same_space(t, known, j + 1, end, "a cast")
                elif t == "device" and self.tokens[j - 1].kind == "id" and self.text(j) in (";", "=", "["):
                    raise self.tokens[i].error(
                        f"{self.text(j - 1)!r} is a variable in device memory, which only the host can make"
                    )
            elif (
                self.tokens[i].kind == "id"
                and self.text(i + 1) == "("
                and len(by_name.get(t, ())) == 1
                and self.text(i - 1) not in (".", "->")
            ):
                if t in self.unit.kernels:
                    raise self.tokens[i].error(f"kernel {t!r} is called; a kernel is started by a dispatch only")
                self.call(by_name[t][0], known, i + 1)
            elif t in self.unit.kernels and self.text(i + 1) == "(" and self.text(i - 1) not in (".", "->"):
                raise self.tokens[i].error(f"kernel {t!r} is called; a kernel is started by a dispatch only")
            i += 1

    def signature(self, f: Function | Kernel) -> dict[str, str]:
        """Pointer and reference parameters by name, with their address space."""
        known: dict[str, str] = {}
        for a, b in self.arguments(f.sig[0]):
            words = [self.text(k) for k in range(a, b)]
            space = next((w for w in words if w in SPACES), "")
            if space and ("*" in words or "&" in words):
                stop = words.index("[") if "[" in words else words.index("=") if "=" in words else len(words)
                known[words[stop - 1]] = space
        return known

    def arguments(self, paren: int) -> list[tuple[int, int]]:
        parts, first, i, end = [], paren + 1, paren + 1, self.pair[paren]
        while i < end:
            if i in self.pair:
                i = self.pair[i]
            elif self.text(i) == "<" and self.tokens[i - 1].kind == "id":
                i = self.angle(i) - 1
            elif self.text(i) == ",":
                parts.append((first, i))
                first = i + 1
            i += 1
        return [*parts, (first, end)] if first < end else parts

    def same_space(self, space: str, known: dict[str, str], i: int, end: int, what: str) -> None:
        """`i` starts an expression; where it is a pointer that we know, its space must be `space`."""
        if self.text(i) == "&":
            i += 1
        other = known.get(self.text(i))
        if other and other != space and self.text(i + 1) in (";", ",", "+", "-", ")") and i < end:
            raise self.tokens[i].error(
                f"{self.text(i)!r} points to {other} memory; {what} is a pointer to {space} memory"
            )

    def call(self, callee: Function, known: dict[str, str], paren: int) -> None:
        given, taken = self.arguments(paren), self.arguments(callee.sig[0])
        for (a, b), (c, d) in zip(given, taken, strict=False):
            words = [self.text(k) for k in range(c, d)]
            space = next((w for w in words if w in SPACES), "")
            if space and "*" in words and (b - a == 1 or self.text(a + 1) in ("+", "-")):
                other = known.get(self.text(a))
                if other and other != space:
                    raise self.tokens[a].error(
                        f"{self.text(a)!r} points to {other} memory; {callee.name!r} takes a pointer to {space} memory"
                    )

    # ---- the rest

    def statics(self, f: Function | Kernel) -> None:
        for i in range(*f.body):
            if self.text(i) == "static" and self.tokens[i].kind == "id":
                near = {self.text(k) for k in range(i - 2, i + 4)}
                if not near & {"constant", "constexpr", "threadgroup"}:
                    raise self.tokens[i].error("a static variable in a function: threads share no mutable data")

    def recursion(self) -> None:
        count: dict[str, int] = {}
        for f in self.unit.functions:
            count[f.name] = count.get(f.name, 0) + 1
        graph: dict[str, set[str]] = {}
        lines: dict[str, Function] = {}
        for f in self.unit.functions:
            if (
                count[f.name] == 1 and not f.template and not f.member
            ):  # overloads and templates may call their namesakes
                called = {
                    self.text(i)
                    for i in range(*f.body)
                    if self.text(i + 1) == "(" and self.text(i - 1) not in (".", "->", "::")
                }
                graph[f.name], lines[f.name] = called, f
        state: dict[str, int] = {}

        def visit(name: str) -> str:
            state[name] = 1
            for other in graph[name]:
                if other in graph:
                    if state.get(other) == 1:
                        return other
                    if other not in state and (found := visit(other)):
                        return found
            state[name] = 2
            return ""

        for name in graph:
            if name not in state and (found := visit(name)):
                raise self.tokens[lines[found].sig[0]].error(
                    f"function {found!r} calls itself: recursion is not part of Metal"
                )

    def threadgroup_size(self, kernel: Kernel) -> None:
        total = 0
        for v in kernel.threadgroup:
            name = self.text(v.type[1] - 1)
            base = name.rstrip("234")
            width = {"2": 2, "3": 4, "4": 4}.get(name[len(base) :], 1) if name != base else 1
            size = _SCALAR_BYTES.get(name if name in _SCALAR_BYTES else base, 0) * (
                1 if name in _SCALAR_BYTES else width
            )
            for k in range(*v.dims):
                if self.text(k) not in ("[", "]"):
                    size *= int(self.text(k)) if self.text(k).isdigit() else 0
            total += size
        if total > MAX_THREADGROUP_BYTES:
            raise self.tokens[kernel.threadgroup[0].start].error(
                f"kernel {kernel.name!r} has {total} bytes of threadgroup memory; "
                f"a threadgroup has {MAX_THREADGROUP_BYTES}"
            )

    def constant_expressions(self) -> None:
        """A function constant has its value when the pipeline is made: too late for what the compiler must know."""
        if not self.constants:
            return
        opened: list[int] = []
        for i, t in enumerate(self.tokens):
            if t.text in ("(", "[", "{") and t.kind == "op":
                opened.append(i)
            elif t.text in (")", "]", "}") and t.kind == "op":
                opened.pop()
            if t.kind != "id" or t.text not in self.constants:
                continue
            why = ""
            if opened and self.text(opened[-1]) == "[" and self.declares_array(opened[-1]):
                why = "an array size"
            elif self.text(i - 1) == "case":
                why = "a case label"
            elif self.text(i - 1) in ("<", ",") and self.is_template_argument(i):
                why = "a template argument"
            else:
                k = i
                while k > 0 and self.text(k - 1) not in _STATEMENT:
                    k -= 1
                if "constexpr" in (self.text(m) for m in range(k, i)):
                    why = "the value of a constexpr variable"
                elif self.text(k) == "static_assert":
                    why = "a static assertion"
            if why:
                raise t.error(f"function constant {t.text!r} is no constant expression and cannot be {why}")

    def declares_array(self, bracket: int) -> bool:
        i = bracket - 1
        while self.text(i) == "]":  # further dimensions
            i = next(a for a, b in self.pair.items() if b == i) - 1
        before = self.tokens[i - 1]
        return self.tokens[i].kind == "id" and (
            before.text == ">" or (before.kind == "id" and before.text not in ("return", "else", "case"))
        )

    def is_template_argument(self, i: int) -> bool:
        k = i
        while k > 0 and self.text(k) not in (";", "{", "}", "("):
            if self.text(k) == "<" and self.tokens[k - 1].kind == "id":
                end = self.angle(k)
                return end > i and (self.text(end) in ("(", "{", "::", ";", ">") or self.tokens[end].kind == "id")
            k -= 1
        return False
