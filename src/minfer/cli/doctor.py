"""`minfer doctor`: the self-test's report, line by line as it is made, or as JSON."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from minfer.cli.terminal import Waiting, as_json, safe, style
from minfer.doctor import about, examine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minfer.backends.base import Check

COLOURS = {"pass": "green", "fail": "red", "skip": "dim"}


def show(devices: Sequence[str], *, replay: bool, json: bool) -> bool:
    """Print the report; whether no line of it failed."""
    start = time.perf_counter()
    verdicts: Counter[str] = Counter()
    lines: list[dict[str, Any]] = []
    head = about()
    found = examine(devices, risky=replay)
    if not json:
        print("\n".join(f"{what:9}  {safe(text)}" for what, text in head.items()))
    part = ""
    for here, check in _waited(found):
        verdicts[check.verdict] += 1
        if json:
            lines.append(
                {"part": here, "name": check.name, "verdict": check.verdict, "text": check.text}
                | ({"values": dict(check.values)} if check.values else {})
            )
            continue
        if here != part:
            print(f"\n{style(here, 'bold', sys.stdout)}")
            part = here
        mark = check.verdict.upper() if check.verdict == "fail" else check.verdict
        text = safe(check.text).replace("\n", "\n        ")
        print(f"  {style(mark, COLOURS[check.verdict], sys.stdout)}  {check.name}: {text}", flush=True)
    seconds = time.perf_counter() - start
    totals = {verdict: verdicts[verdict] for verdict in COLOURS}
    if json:
        print(as_json({"about": head, "lines": lines, "totals": totals, "seconds": round(seconds, 1)}))
    else:
        print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in totals.items())}, {seconds:.0f} s")
    return not verdicts["fail"]


def _waited(found: Iterator[tuple[str, Check]]) -> Iterator[tuple[str, Check]]:
    while True:
        with Waiting("testing"):
            line = next(found, None)
        if line is None:
            return
        yield line
