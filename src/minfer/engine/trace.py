"""A traced step as data: what every node gave, in numbers small enough to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from minfer.engine.engine import Engine

#: Values shown of each node: the first of its first token.
SAMPLE = 8


def summarize(engine: Engine, tokens: Sequence[int]) -> dict[str, Any]:
    """Run `tokens` from an empty context with every value kept: each node's minimum, maximum, mean, NaN and Inf counts
    and first values. KV rows are not values; they are skipped."""
    engine.cells.truncate(0)
    rows = engine.cells.rows(len(tokens))
    values = [
        {"node": node.name, "op": node.kind, "device": node.device, "shape": list(node.shape), **describe(value)}
        for node, value in engine.trace(tokens, rows, n_outputs=1)
    ]
    return {"tokens": list(tokens), "values": values}


def describe(value: npt.NDArray[Any]) -> dict[str, Any]:
    """The numbers of one value; minimum, maximum and mean are of its finite part, None where there is none."""
    finite = value[np.isfinite(value)].astype(np.float64)
    some = bool(finite.size)
    return {
        "min": float(finite.min()) if some else None,
        "max": float(finite.max()) if some else None,
        "mean": float(finite.mean()) if some else None,
        "nan": int(np.isnan(value).sum()),
        "inf": int(np.isinf(value).sum()),
        "sample": [float(v) if np.isfinite(v) else str(v) for v in value.reshape(-1)[:SAMPLE]],
    }
