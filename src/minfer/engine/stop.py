"""Stop strings in streamed text, wherever the token borders fall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopStrings:
    """Passes text through up to the first stop string, holding back only what may still become one.

    The stop string that is complete first ends the text; of two that end together, the longer. So the result does not
    depend on how the text was cut into pieces. One Knuth-Morris-Pratt matcher a string: linear in the text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises RequestError for an empty stop string or one that is not a str."""
        if isinstance(stops, str):
            stops = [stops]
        self._stops = list(dict.fromkeys(stops))
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop is {stop!r}; a stop string is text of at least one character")
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text so far ends with
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show now. Once `found` is set, what follows is swallowed."""
        if self.found is not None:
            return ""
        text = self._held + text
        for at in range(len(self._held), len(text)):
            char = text[at]
            for which, stop in enumerate(self._stops):
                n = self._matched[which]
                while n and stop[n] != char:
                    n = self._borders[which][n - 1]
                n += stop[n] == char
                self._matched[which] = n
                if n == len(stop) and (self.found is None or n > len(self.found)):
                    self.found = stop
            if self.found is not None:
                self._held = ""
                return text[: at + 1 - len(self.found)]
        keep = len(text) - max(self._matched, default=0)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        rest, self._held = self._held, ""
        return rest


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for at in range(1, len(stop)):
        n = borders[-1]
        while n and stop[n] != stop[at]:
            n = borders[n - 1]
        borders.append(n + (stop[n] == stop[at]))
    return borders
