"""The kernels' source text: one file a family, includes resolved, so that a device takes one string."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from minfer.backends.gpu import args

FOLDER = Path(__file__).parent
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.metal")))


@cache
def _lines(family: str) -> tuple[tuple[str, int, str], ...]:
    """Every line of a family's text with the file and the line it comes from."""
    lines: list[tuple[str, int, str]] = []
    seen: set[str] = set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        text = args.header() if name == "args.h" else (FOLDER / name).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith('#include "'):
                add(line.split('"')[1])
            elif line != "#pragma once":
                lines.append((name, number, line))

    add(f"{family}.metal")
    return tuple(lines)


@cache
def source(family: str) -> str:
    """The whole text of a family's file. Its own includes are replaced by their text, `args.h` is generated."""
    return "\n".join(text for _, _, text in _lines(family)) + "\n"


def origin(family: str, line: int) -> str:
    """`file:line` of a line (from 1) of a family's whole text, for what a compiler says about it."""
    lines = _lines(family)
    if not 1 <= line <= len(lines):
        return f"{family}.metal"
    file, number, _ = lines[line - 1]
    return f"{file}:{number}"
