"""Write the generated tables of README.md and docs/graph.md from the code: `python scripts/tables.py [--check]`."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minfer.backends import DEVICES
from minfer.graph.fuse import FUSIONS
from minfer.graph.rules import RULES
from minfer.models import ARCHITECTURES
from minfer.quants import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(map(str, head)), None, *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" if cells else f"|{' --- |' * len(lines[0])}" for cells in lines)


def summary(thing: object) -> str:
    """A docstring's first paragraph, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def architectures() -> str:
    rows = []
    for name, architecture in ARCHITECTURES.items():
        module = sys.modules[architecture.__module__]
        rows.append((f"`{name}`", summary(module)))
    return table(("architecture", "what it is"), rows)


def formats() -> str:
    rows = []
    for name, fmt in FORMATS.items():
        bits = 8 * fmt.block_bytes / fmt.block_size
        rows.append((name, fmt.block_size, fmt.block_bytes, f"{bits:g}", "yes" if fmt.quantizes else "-"))
    return table(("weight type", "values a block", "bytes a block", "bits a weight", "minfer can write it"), rows)


def kv_formats() -> str:
    f32 = KV_FORMATS["f32"].row_bytes(1024)
    rows = [(name, fmt.row_bytes(1024), f"{f32 / fmt.row_bytes(1024):.2f}x") for name, fmt in KV_FORMATS.items()]
    return table(("KV format", "bytes for 1,024 values", "smaller than f32"), rows)


def devices() -> str:
    rows = []
    for name in DEVICES:
        module = __import__(f"minfer.backends.{name}", fromlist=["_"])
        rows.append((f"`{name}`", summary(module)))
    return table(("device", "what it is"), rows)


def ops() -> str:
    rows = []
    for op, rule in RULES.items():
        inputs = ", ".join(rule.inputs) + (f" (the last {rule.optional} optional)" if rule.optional else "")
        rows.append((f"`{op.__name__}`", inputs or "-", rule.text.replace("|", "\\|"), summary(op)))
    return table(("op", "inputs", "shapes", "value"), rows)


def fusions() -> str:
    return table(
        ("rule", "what it does", "tokens"),
        [(f"`{rule.name}`", summary(rule.match), rule.tokens) for rule in FUSIONS],
    )


TABLES = {
    "README.md": {"architectures": architectures, "formats": formats, "kv-formats": kv_formats, "devices": devices},
    "docs/graph.md": {"ops": ops, "fusions": fusions},
}


def filled(text: str, makers: dict[str, object]) -> str:
    for name, make in makers.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"no place for table {name}")
        body = make()  # type: ignore[operator]
        text = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


def main() -> int:
    stale = []
    for name, makers in TABLES.items():
        path = ROOT / name
        before = path.read_text()
        after = filled(before, makers)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after)
    if stale and "--check" in sys.argv:
        print(
            f"{', '.join(stale)}: the tables are not what the code says; run python scripts/tables.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
