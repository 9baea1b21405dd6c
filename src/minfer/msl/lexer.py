"""Metal source text to tokens. A token knows its file and line, so every later error can name them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from .errors import SourceError

NO_HIDE: frozenset[str] = frozenset()


@dataclass(slots=True)
class Token:
    """One token. `kind` is id, num, str, chr, op or pragma; `space` tells whether white space came before it;
    `bol` whether it is the first of its line; `hide` holds the macros that must not expand it again."""

    kind: str
    text: str
    file: str
    line: int
    space: bool = False
    bol: bool = False
    hide: frozenset[str] = field(default=NO_HIDE)

    def at(self, file: str, line: int) -> Token:
        """The same token, moved to another place (that of a macro's use)."""
        return replace(self, file=file, line=line)

    def error(self, reason: str) -> SourceError:
        """A SourceError at this token."""
        return SourceError(reason, self.file, self.line)


# '>>' is never one token: template argument lists would have to split it again. '>' '>' printed side by side is '>>'.
_TOKEN = re.compile(
    r"""(?P<nl>\n)
  | (?P<ws>(?:[ \t\r\f\v]|\\\r?\n)+ | //(?:\\\r?\n|[^\n])* | /\*.*?\*/)
  | (?P<id>[A-Za-z_]\w*)
  | (?P<num>\.?\d(?:[eEpP][+-](?=\d)|[\w.]|'(?=\w))*)
  | (?P<str>"(?:\\.|[^"\\\n])*")
  | (?P<chr>'(?:\\.|[^'\\\n])+')
  | (?P<open>/\*)
  | (?P<op>\.\.\.|<<=|->\*|::|->|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|[-+*/%&|^~!=<>?:;,.(){}\[\]\#@])""",
    re.VERBOSE | re.DOTALL,
)
MAX_SOURCE_BYTES = 16 << 20


def tokenize(text: str, file: str) -> list[list[Token]]:
    """Split `text` into lines of tokens; a line ends at a newline that no backslash precedes.

    Raises SourceError on a character that is no part of the language, an open comment or an open string.
    """
    if len(text) > MAX_SOURCE_BYTES:
        raise SourceError(f"source of {len(text)} characters; at most {MAX_SOURCE_BYTES} are read", file, 1)
    lines: list[list[Token]] = []
    current: list[Token] = []
    line, pos, end, space = 1, 0, len(text), False
    match = _TOKEN.match
    while pos < end:
        m = match(text, pos)
        if m is None:
            what = "a string that is not closed" if text[pos] == '"' else f"unexpected character {text[pos]!r}"
            raise SourceError(what, file, line)
        kind = m.lastgroup or ""
        if kind == "open":
            raise SourceError("a comment that is not closed", file, line)
        pos = m.end()
        if kind == "nl":
            if current:
                lines.append(current)
                current = []
            line, space = line + 1, False
        elif kind == "ws":
            space = True
            line += m.group().count("\n")
        else:
            current.append(Token(kind, m.group(), file, line, space, not current))
            space = False
    if current:
        lines.append(current)
    return lines
