"""The C preprocessor for Metal sources: macros, conditionals and includes, without a compiler or a shell.

It is ours because the CUDA back end must work where no C++ compiler is installed, because every token keeps its place,
and because an `#include` must not read what the caller did not offer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SourceError
from .lexer import NO_HIDE, Token, tokenize
from .ppexpr import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SYSTEM_HEADERS = frozenset(
    [
        "metal_" + s
        for s in [
            "stdlib",
            "simdgroup",
            "simdgroup_matrix",
            "math",
            "integer",
            "common",
            "geometric",
            "matrix",
            "relational",
            "atomic",
            "pack",
            "compute",
            "types",
            "numeric",
            "limits",
            "uniform",
            "quadgroup",
            "type_traits",
            "array",
            "extended_vector",
            "graphics",
            "texture",
            "tensor",
        ]
    ]
    + ["simd/simd.h", "TargetConditionals.h"]
)
PREDEFINED = {
    "__METAL__": "1",
    "__METAL_MACOS__": "1",
    "__METAL_VERSION__": "310",
    "__HAVE_BFLOAT__": "1",
    "__cplusplus": "201402L",
    "__HAVE_SIMDGROUP_MATRIX__": "1",
    "__HAVE_QUADGROUP__": "1",
    "__HAVE_SIMDGROUP__": "1",
    "__HAVE_SIMDGROUP_REDUCTION__": "1",
}
MAX_INCLUDE_DEPTH, MAX_TOKENS, MAX_EXPANSIONS = 64, 2_000_000, 300_000


@dataclass(slots=True)
class Macro:
    """`params` is None for an object-like macro; `variadic` when the last parameter takes the rest."""

    name: str
    params: list[str] | None
    body: list[Token]
    variadic: bool = False


class Preprocessor:
    """One translation unit's state. `files` lists what was read, for a cache key."""

    def __init__(self, include_dirs: Sequence[Path] = (), defines: Mapping[str, str] | None = None) -> None:
        self.include_dirs = [Path(d).resolve() for d in include_dirs]
        self.macros: dict[str, Macro] = {}
        self.once: set[str] = set()
        self.files: list[Path] = []
        self.out: list[Token] = []
        self.count = 0
        for name, value in {**PREDEFINED, **(defines or {})}.items():
            lines = tokenize(value, "<define>")
            self.macros[name] = Macro(name, None, [t for line in lines for t in line])

    def run(self, text: str, file: str, directory: Path | None = None, depth: int = 0) -> list[Token]:
        """Preprocess `text`; quoted includes are looked up in `directory` and then in the include directories."""
        if depth > MAX_INCLUDE_DEPTH:
            raise SourceError("includes are nested too deep", file, 1)
        lines = tokenize(text, file)
        taken: list[tuple[bool, bool, Token]] = []  # (this branch is live, some branch was taken, the #if)
        pending: list[Token] = []
        for line in lines:
            live = all(t[0] for t in taken)
            if line[0].text != "#":
                if live:
                    pending += line
                continue
            if pending:
                self._emit(pending)
                pending = []
            if len(line) > 1:
                self._directive(line, live, taken, file, directory, depth)
        if taken:
            raise taken[-1][2].error("#if without #endif")
        self._emit(pending)
        return self.out

    def _emit(self, tokens: list[Token]) -> None:
        self.out += self.expand(tokens)
        if len(self.out) > MAX_TOKENS:
            raise tokens[-1].error(f"more than {MAX_TOKENS} tokens after preprocessing")

    def _directive(
        self,
        line: list[Token],
        live: bool,
        taken: list[tuple[bool, bool, Token]],
        file: str,
        directory: Path | None,
        depth: int,
    ) -> None:
        name, rest, head = line[1].text, line[2:], line[1]
        if name in ("if", "ifdef", "ifndef"):
            outer = all(t[0] for t in taken)
            hit = outer and self._condition(name, rest, head)
            taken.append((hit, hit or not outer, head))
        elif name in ("elif", "else"):
            if not taken:
                raise head.error(f"#{name} without #if")
            _, done, opened = taken.pop()
            outer = all(t[0] for t in taken)
            hit = outer and not done and (name == "else" or self._condition("if", rest, head))
            taken.append((hit, done or hit, opened))
        elif name == "endif":
            if not taken:
                raise head.error("#endif without #if")
            taken.pop()
        elif not live:
            return
        elif name == "define":
            self._define(rest, head)
        elif name == "undef":
            if rest:
                self.macros.pop(rest[0].text, None)
        elif name in ("include", "import"):
            self._include(rest, head, file, directory, depth, once=name == "import")
        elif name == "pragma":
            if rest and rest[0].text == "once":
                self.once.add(file)
            elif rest:
                text = " ".join(t.text for t in self.expand(rest))
                self.out.append(Token("pragma", text, head.file, head.line, True, True))
        elif name == "error":
            raise head.error("#error " + " ".join(t.text for t in rest))
        elif name not in ("warning", "line"):
            raise head.error(f"unknown directive #{name}")

    def _condition(self, name: str, rest: list[Token], head: Token) -> bool:
        if not rest:
            raise head.error(f"#{name} without a condition")
        if name != "if":
            return (rest[0].text in self.macros) == (name == "ifdef")
        plain: list[Token] = []
        i = 0
        while i < len(rest):
            t = rest[i]
            if t.text in (
                "defined",
                "__has_include",
                "__has_builtin",
                "__has_feature",
                "__has_extension",
                "__has_attribute",
            ):
                paren = i + 1 < len(rest) and rest[i + 1].text == "("
                end = i + 1
                if paren:
                    while end < len(rest) and rest[end].text != ")":
                        end += 1
                arg = "".join(x.text for x in rest[i + 2 if paren else i + 1 : end if paren else i + 2])
                yes = (
                    arg in self.macros
                    if t.text == "defined"
                    else (t.text == "__has_include" and self._is_system(arg.strip("<>")))
                )
                plain.append(Token("num", "1" if yes else "0", t.file, t.line, True))
                i = end + 1
            else:
                plain.append(t)
                i += 1
        return evaluate(self.expand(plain), head) != 0

    def _define(self, rest: list[Token], head: Token) -> None:
        if not rest or rest[0].kind != "id":
            raise head.error("#define without a name")
        name, body, params, variadic = rest[0].text, rest[1:], None, False
        if body and body[0].text == "(" and not body[0].space:
            params, i = [], 1
            while i < len(body) and body[i].text != ")":
                if body[i].text == "...":
                    variadic = True
                    params.append("__VA_ARGS__")
                elif body[i].kind == "id":
                    params.append(body[i].text)
                elif body[i].text != ",":
                    raise head.error(f"bad parameter list of macro {name}")
                i += 1
            if i == len(body):
                raise head.error(f"open parameter list of macro {name}")
            body = body[i + 1 :]
        self.macros[name] = Macro(name, params, body, variadic)

    @staticmethod
    def _is_system(name: str) -> bool:
        return name in SYSTEM_HEADERS or (name.endswith(".h") and name[:-2] in SYSTEM_HEADERS)

    def _include(
        self, rest: list[Token], head: Token, file: str, directory: Path | None, depth: int, *, once: bool
    ) -> None:
        if rest and rest[0].kind == "id":
            rest = self.expand(rest)
        if rest and rest[0].kind == "str":
            name, quoted = rest[0].text[1:-1], True
        elif rest and rest[0].text == "<":
            name, quoted = "".join(t.text for t in rest[1:-1]), False
        else:
            raise head.error("#include without a file name")
        if self._is_system(name):
            return
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise head.error(f"#include of {name!r}: only names below an include directory are read")
        for base in ([directory] if quoted and directory is not None else []) + self.include_dirs:
            path = (base / name).resolve()
            if not path.is_file() or not path.is_relative_to(base):  # a link may lead out
                continue
            if str(path) in self.once:
                return
            if once:
                self.once.add(str(path))
            self.files.append(path)
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise head.error(f"cannot read {name!r}: {error}") from error
            self.run(text, str(path), path.parent, depth + 1)
            return
        raise head.error(f"{name!r} is not one of Metal's headers and is in none of the include directories")

    def expand(self, tokens: list[Token]) -> list[Token]:
        """Expand macros in `tokens` (the work list is a reversed stack, so an expansion is scanned again)."""
        macros, out, stack = self.macros, [], tokens[::-1]
        while stack:
            t = stack.pop()
            if t.kind != "id":
                out.append(t)
                continue
            macro = macros.get(t.text)
            if macro is None or t.text in t.hide:
                if t.text == "_Pragma" and stack and stack[-1].text == "(" and len(stack) > 2:
                    text = stack[-2].text[1:-1].replace('\\"', '"')
                    del stack[-3:]
                    out.append(Token("pragma", text, t.file, t.line, True, True))
                elif t.text == "__LINE__":
                    out.append(Token("num", str(t.line), t.file, t.line, t.space))
                elif t.text == "__FILE__":
                    out.append(Token("str", '"' + t.file.replace("\\", "/") + '"', t.file, t.line, t.space))
                else:
                    out.append(t)
                continue
            self.count += 1
            if self.count > MAX_EXPANSIONS:
                raise t.error("macro expansion does not come to an end")
            if macro.params is None:
                body = self._substitute(macro, {}, t)
            else:
                if not stack or stack[-1].text != "(":
                    out.append(t)
                    continue
                args = self._arguments(macro, stack, t)
                body = self._substitute(macro, args, t)
            stack += body[::-1]
            if len(stack) > MAX_TOKENS:
                raise t.error("macro expansion does not come to an end")
        return out

    @staticmethod
    def _arguments(macro: Macro, stack: list[Token], use: Token) -> dict[str, list[Token]]:
        stack.pop()
        params = macro.params or []
        args: list[list[Token]] = [[]]
        depth = 0
        while True:
            if not stack:
                raise use.error(f"open argument list of macro {macro.name}")
            t = stack.pop()
            if t.kind == "op":
                if t.text in "([{":
                    depth += 1
                elif t.text == ")" and depth == 0:
                    break
                elif t.text in ")]}":
                    depth -= 1
                elif t.text == "," and depth == 0 and not (macro.variadic and len(args) == len(params)):
                    args.append([])
                    continue
            args[-1].append(t)
        if not params and args == [[]]:
            args = []
        if macro.variadic and len(args) == len(params) - 1:
            args.append([])
        if len(args) != len(params):
            raise use.error(f"macro {macro.name} takes {len(params)} arguments, {len(args)} given")
        return dict(zip(params, args, strict=True))

    def _substitute(self, macro: Macro, args: dict[str, list[Token]], use: Token) -> list[Token]:
        hide = use.hide | {macro.name}
        out: list[Token] = []
        body, i = macro.body, 0
        expanded: dict[str, list[Token]] = {}
        while i < len(body):
            t = body[i]
            nxt = body[i + 1].text if i + 1 < len(body) else ""
            if t.text == "#" and macro.params is not None and nxt in args:
                text = "".join((" " if a.space and k else "") + a.text for k, a in enumerate(args[nxt]))
                text = text.replace("\\", "\\\\").replace('"', '\\"')
                out.append(Token("str", f'"{text}"', use.file, use.line, t.space))
                i += 2
                continue
            if t.text == "##" and out and i + 1 < len(body):
                right = args.get(nxt, [body[i + 1]])
                if right:
                    left = out.pop()
                    out += self._paste(left, right[0], use)
                    out += [Token(r.kind, r.text, use.file, use.line, r.space, False, r.hide | hide) for r in right[1:]]
                i += 2
                continue
            if t.text in args:
                raw = args[t.text]
                if nxt == "##":
                    piece = raw
                    if not raw:  # an empty operand: the other side stands alone
                        other = body[i + 2].text if i + 2 < len(body) else ""
                        piece = args.get(other, [body[i + 2]] if i + 2 < len(body) else [])
                        i += 2
                else:
                    if t.text not in expanded:
                        expanded[t.text] = self.expand(raw)
                    piece = expanded[t.text]
                for k, a in enumerate(piece):
                    out.append(
                        Token(a.kind, a.text, use.file, use.line, t.space if k == 0 else a.space, False, a.hide | hide)
                    )
            else:
                out.append(Token(t.kind, t.text, use.file, use.line, t.space, False, t.hide | hide))
            i += 1
        if out:
            out[0].space, out[0].bol = use.space, use.bol
        return out

    @staticmethod
    def _paste(left: Token, right: Token, use: Token) -> list[Token]:
        lines = tokenize(left.text + right.text, use.file)
        made = lines[0] if lines else []
        for t in made:
            t.line, t.hide = use.line, left.hide | NO_HIDE
        if made:
            made[0].space = left.space
        return made
