"""Where a program's host time goes. A backend without a profile measures nothing."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
