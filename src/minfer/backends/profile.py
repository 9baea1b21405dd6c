"""Where a program's host time goes, and its launches' time on the device. Without a profile nothing is measured."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minfer.backends.base import LaunchTime


@dataclass(slots=True)
class Profile:
    """Seconds and calls by what was done: an op, a submission, a wait."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        self.calls[what] = self.calls.get(what, 0) + 1

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - start)

    def table(self) -> str:
        """The most expensive first."""
        order = sorted(self.seconds, key=lambda what: -self.seconds[what])
        width = max(map(len, order), default=0)
        return "\n".join(
            f"{what.ljust(width)}  {self.seconds[what]:10.4f} s  {self.calls[what]:8,} x  "
            f"{1e3 * self.seconds[what] / self.calls[what]:10.3f} ms each"
            for what in order
        )


def launch_table(times: Sequence[LaunchTime]) -> str:
    """Launches of a step by kernel, those that took longest together first."""
    seconds: dict[str, list[float]] = {}
    for launch in times:
        seconds.setdefault(launch.kernel, []).append(launch.seconds)
    whole = sum(map(sum, seconds.values())) or 1.0
    width = max(map(len, seconds), default=0)
    return "\n".join(
        f"{kernel.ljust(width)}  {1e3 * sum(each):10.3f} ms  {100 * sum(each) / whole:5.1f}%  {len(each):6,} x  "
        f"{1e6 * sum(each) / len(each):10.1f} us each"
        for kernel, each in sorted(seconds.items(), key=lambda item: -sum(item[1]))
    )
