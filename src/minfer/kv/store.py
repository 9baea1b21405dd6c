"""The cell store: sequences of positions, each position kept in one cell (row) of every layer's KV region.

Position (what rope rotates by) and cell (where the row lives) are different numbers to every caller. This store holds
one sequence, whose cells equal its positions, so its window layout is the causal one (no window values).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minfer.errors import ContextOverflowError

I32 = npt.NDArray[np.int32]
_CAUSAL = np.zeros(0, np.int32)  # the window of queries that read every cell up to their own


@dataclass(frozen=True, slots=True)
class Rows:
    """Where `n` new tokens go: their positions and cells (n each), and the window of each query, flat."""

    positions: I32
    cells: I32
    window: I32
    layout: int


class CellStore:
    """`n_cells` cells and the sequence that fills them. `tokens` are the ids whose rows are there."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def free(self) -> int:
        return self.n_cells - len(self.tokens)

    def require(self, n: int) -> None:
        """Raise `ContextOverflowError` unless `n` more tokens fit."""
        if n > self.free:
            raise ContextOverflowError(
                f"{n:,} tokens do not fit: the context has {self.n_cells:,} cells and {len(self):,} are in use; "
                "shorten the prompt or ask for a larger context (n_ctx)"
            )

    def rows(self, n: int, after: int = 0) -> Rows:
        """The rows that the next `n` tokens take, `after` others under way; nothing is taken until `commit`."""
        self.require(after + n)
        first = len(self) + after
        place = np.arange(first, first + n, dtype=np.int32)
        return Rows(place, place, _CAUSAL, 0)

    def commit(self, tokens: list[int]) -> None:
        """The rows of these tokens, in order, were written."""
        self.require(len(tokens))
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot keep {length} of {len(self)} tokens")
        del self.tokens[length:]

    def common_prefix(self, tokens: list[int]) -> int:
        """How many leading tokens are already there."""
        shared = min(len(self), len(tokens))
        return next((i for i in range(shared) if self.tokens[i] != tokens[i]), shared)
