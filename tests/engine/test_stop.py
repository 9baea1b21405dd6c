"""Stop strings: found wherever the pieces are cut, and only what may still match is held back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.engine.stop import StopStrings
from minfer.errors import RequestError

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(alphabet="abc\n", max_size=4), max_size=12)


def slow_find(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read on, one character at a time, until what was read ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(PIECES, STOPS)
def test_found_wherever_the_pieces_are_cut(pieces, stops):
    stream = StopStrings(stops)
    shown = "".join([stream.push(piece) for piece in pieces]) + stream.finish()
    assert (shown, stream.found) == slow_find("".join(pieces), stops)


@given(PIECES, STOPS)
def test_holds_back_exactly_what_may_become_a_stop_string(pieces, stops):
    stream, shown, text = StopStrings(stops), "", ""
    for piece in pieces:
        shown += stream.push(piece)
        text += piece
        if stream.found is not None:
            return
        held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert len(text) - len(shown) == max(held, default=0)


def test_by_hand():
    stream = StopStrings(["</s>", "\n\nUser:"])
    assert [stream.push(piece) for piece in ["Hi", " there", "\n", "\nUs", "ing <", "/", "s", "> gone"]] == [
        *["Hi", " there", "", "", "\n\nUsing ", "", "", ""]
    ]
    assert stream.found == "</s>"
    assert stream.push("more") == ""
    assert stream.finish() == ""
    unfinished = StopStrings("stop")
    assert unfinished.push("sto") == ""
    assert unfinished.finish() == "sto"
    assert StopStrings([]).push("anything") == "anything"


def test_work_is_linear():
    """The borders make every character cost at most two comparisons, even for the worst stop string."""
    compared = 0

    class Counted(str):
        def __getitem__(self, at):
            nonlocal compared
            compared += 1
            return str.__getitem__(self, at)

    stream = StopStrings(["a" * 500 + "b"])
    stream._stops = [Counted(stop) for stop in stream._stops]
    text = ("a" * 499 + "c") * 40
    cuts = sorted(random.Random(1).sample(range(len(text)), 300))
    shown = "".join(stream.push(text[a:b]) for a, b in pairwise([0, *cuts, len(text)]))
    assert shown == text
    assert compared <= 4 * len(text)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], [b"x"], ""])
def test_refused(stops):
    with pytest.raises(RequestError, match="a stop string is text of at least one character"):
        StopStrings(stops)
