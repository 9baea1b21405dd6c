"""Rotary angles as the native core takes them: radians a position for each pair, and a magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from minfer.graph.ir import RopeScaling, RopeSpec


def angles(spec: RopeSpec, freqs: npt.NDArray[np.float32] | None) -> tuple[list[float], float]:
    """Pair i turns by `inverse[i]` radians a position; both its cosine and sine are multiplied by the magnitude."""
    n = spec.n_dims
    inverse = np.power(float(spec.base), -np.arange(0, n, 2, dtype=np.float64) / n)
    if freqs is not None:
        inverse /= freqs
    scaling = spec.scaling
    if scaling is None:
        return inverse.tolist(), 1.0
    if scaling.kind == "linear":
        return (inverse / scaling.factor).tolist(), 1.0
    # arXiv:2309.00071: pairs that turn often keep their angle, pairs that turn rarely are stretched, a ramp between.
    first = max(math.floor(_pair_with_turns(spec, scaling, scaling.beta_fast)), 0)
    last = min(math.ceil(_pair_with_turns(spec, scaling, scaling.beta_slow)), n - 1)
    stretched = ((np.arange(n // 2) - first) / max(last - first, 0.001)).clip(0.0, 1.0)
    inverse *= (1.0 - stretched) + stretched / scaling.factor
    return inverse.tolist(), scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor))


def _pair_with_turns(spec: RopeSpec, scaling: RopeScaling, turns: float) -> float:
    """The (fractional) pair that makes `turns` full turns over the original context."""
    return spec.n_dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.base))
