"""The cell store of one sequence."""

from __future__ import annotations

import numpy as np
import pytest

from minfer.errors import ContextOverflowError
from minfer.kv import CellStore


def test_rows_follow_what_was_committed() -> None:
    store = CellStore(8)
    rows = store.rows(3)
    assert rows.positions.tolist() == rows.cells.tolist() == [0, 1, 2]
    assert rows.window.size == rows.layout == 0
    assert rows.positions.dtype == np.int32
    assert store.rows(3).cells.tolist() == [0, 1, 2], "asking takes nothing"
    store.commit([5, 6, 7])
    assert store.rows(2).cells.tolist() == [3, 4]
    assert (len(store), store.free) == (3, 5)


def test_an_overflow_says_both_numbers_and_takes_nothing() -> None:
    store = CellStore(8)
    store.commit([1] * 6)
    with pytest.raises(ContextOverflowError, match=r"3 tokens do not fit: the context has 8 cells and 6 are in use"):
        store.rows(3)
    with pytest.raises(ContextOverflowError):
        store.commit([1, 2, 3])
    assert len(store) == 6


def test_truncation_and_prefix() -> None:
    store = CellStore(8)
    store.commit([1, 2, 3, 4])
    assert store.common_prefix([1, 2, 9]) == 2
    assert store.common_prefix([1, 2, 3, 4, 5]) == 4
    assert store.common_prefix([1]) == 1
    assert store.common_prefix([]) == 0
    store.truncate(2)
    assert store.tokens == [1, 2]
    assert store.rows(1).cells.tolist() == [2]
    for length in (-1, 3):
        with pytest.raises(ValueError, match="cannot keep"):
            store.truncate(length)
