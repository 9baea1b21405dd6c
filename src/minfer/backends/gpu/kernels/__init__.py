"""The kernels' source text: one file a family, includes resolved, so that a device takes one string."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from minfer.backends.gpu import args

FOLDER = Path(__file__).parent
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.metal")))


@cache
def source(family: str) -> str:
    """The whole text of a family's file. Its own includes are replaced by their text, `args.h` is generated."""
    lines: list[str] = []
    seen: set[str] = set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        text = args.header() if name == "args.h" else (FOLDER / name).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith('#include "'):
                add(line.split('"')[1])
            elif line != "#pragma once":
                lines.append(line)

    add(f"{family}.metal")
    return "\n".join(lines) + "\n"
