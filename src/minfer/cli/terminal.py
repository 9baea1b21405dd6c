"""What the commands show: notes and progress on standard error, colours only where a person looks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from types import TracebackType

    from rich.progress import Progress as RichProgress

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
# A model's output and a file's metadata are foreign text: on a terminal, what would steer it is shown instead.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def coloured(stream: TextIO) -> bool:
    """A terminal, and the user has nothing against colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, name: str, stream: TextIO) -> str:
    return f"\x1b[{_CODES[name]}m{text}\x1b[0m" if coloured(stream) else text


def safe(text: str, stream: TextIO | None = None) -> str:
    """Foreign text for a terminal: control characters made visible. Elsewhere it stays as it is."""
    return text.translate(_VISIBLE) if (stream or sys.stdout).isatty() else text


def write(text: str) -> None:
    """A piece of generated text, at once."""
    sys.stdout.write(safe(text))
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about what goes on."""
    print(style(safe(text, sys.stderr), "dim", sys.stderr), file=sys.stderr)


def complain(text: str) -> None:
    print(style("error:", "red", sys.stderr), safe(text, sys.stderr), file=sys.stderr)


def table(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> str:
    """Aligned columns, two spaces apart; the columns in `right` are set to the right. No rows: "none"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(range(len(row)), row, widths, strict=True)
        return "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, cell, w in cells).rstrip()

    return "\n".join(map(line, rows)) or "none"


def as_json(value: object) -> str:
    import json

    return json.dumps(value, indent=1, ensure_ascii=False)


class Waiting:
    """Says what is being waited for, on a terminal, once it takes longer than a moment; then clears the line."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            import threading

            self._timer = threading.Timer(0.5, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def _show(self) -> None:
        self._shown = True
        print(style(f"{self._what} ...", "dim", sys.stderr), end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
            if self._shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.done()


class Download:
    """A progress callback for `sources`: a bar on a terminal, elsewhere one line for each thing that begins."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._what = ""

    def __enter__(self) -> Download:
        return self

    def __call__(self, done: int, total: int | None, what: str) -> None:
        begins, self._what = what != self._what, what
        if not sys.stderr.isatty():
            if begins:
                print(what, file=sys.stderr)
            return
        if self._bar is None:
            self._bar = _rich_bar()
            self._bar.start()
        if begins:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(safe(what, sys.stderr), total=total)
        # A size that pip announced is rounded; the bar must not pass its end.
        self._bar.update(self._bar.task_ids[-1], completed=done if total is None else min(done, total), total=total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
