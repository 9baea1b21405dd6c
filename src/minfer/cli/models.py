"""`minfer list`."""

from __future__ import annotations

import sys

from minfer import sources
from minfer.cli.terminal import as_json, note, safe, table
from minfer.sources import cache


def show(*, json: bool) -> None:
    entries = sources.installed()
    if json:
        rows = [
            {
                "name": entry.name,
                "source": entry.source,
                "path": str(entry.path) if entry.files else None,
                "bytes": entry.size,
                "sha256": {file.name: file.sha256 for file in entry.files},
                "problem": entry.problem,
            }
            for entry in entries
        ]
        print(as_json(rows))
        return
    if not entries:
        note(f"no models in {cache.root()}; fetch one with: minfer pull {sources.DEFAULT}")
        return
    lines = [("NAME", "SIZE", "SOURCE")]
    lines += [(safe(entry.name), cache.human(entry.size), safe(entry.source)) for entry in entries]
    print(table(lines, right=(1,)))
    sys.stdout.flush()
    for entry in entries:
        if entry.problem == "unfinished":
            note(f"unfinished: {entry.source}; go on with minfer pull, or drop it with minfer rm")
        elif entry.problem:
            note(f"damaged: {entry.problem}")
