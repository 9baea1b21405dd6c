"""How long the command line takes to start: `python benchmarks/startup.py`.

Medians of interleaved rounds, in milliseconds, of CPU and of wall time; an empty Python and `import typer` beside them
are the floor that minfer stands on.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import typer": ["-c", "import typer"],
    "minfer --help": ["-m", "minfer", "--help"],
    "minfer run --help": ["-m", "minfer", "run", "--help"],
    "minfer list": ["-m", "minfer", "list"],
}


def run(arguments: list[str]) -> tuple[float, float]:
    """CPU and wall milliseconds of one start."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu * 1e3, wall * 1e3


if __name__ == "__main__":
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():
        run(arguments)  # warms the page cache
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(run(arguments))
    print(f"{'':18}  cpu ms  wall ms")
    for name, taken in times.items():
        cpu, wall = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{name:18}  {cpu:6.0f}  {wall:7.0f}")
