"""From logits to the next token: the sampler chain.

The steps run in the order of llama.cpp's default chain: logit bias, penalties, top-k, typical, top-p, min-p,
temperature, draw. With temperature 0 the token is the arg-max after bias and penalties.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer.errors import NumericsError, RequestError

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bounds = f"{'above' if open_low else 'from'} {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
    if open_low and high == math.inf:
        bounds = f"above {low:g}"
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise RequestError(f"{name} is {value!r}; it must be a number {bounds}")


def _check_int(name: str, value: object, low: int, high: int | None = None, *, note: str = "") -> None:
    bounds = f"from {low} to {high}" if high is not None else f"of {low} or more"
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise RequestError(f"{name} is {value!r}; it must be a whole number {bounds}{note}")


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; names and defaults are llama.cpp's (its repeat penalty is off by default).

    `top_k=0`, `top_p=1`, `min_p=0`, `typical_p=1`, `repeat_penalty=1` and penalties of 0 switch a step off.
    `repeat_last_n` is how many of the last tokens the penalties look at (0 none, -1 all). `logit_bias` adds to a
    token's logit (-inf bans it). `n_probs` asks for the n best tokens with their log-probabilities.
    Raises RequestError naming the field, its value and the range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n_probs: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_int("top_k", self.top_k, 0, note=" (0: all tokens)")
        for name in ("top_p", "min_p", "typical_p"):
            _check_number(name, getattr(self, name), 0, 1)
        _check_number("repeat_penalty", self.repeat_penalty, 0, math.inf, open_low=True)
        _check_int("repeat_last_n", self.repeat_last_n, -1, note=" (-1: the whole text)")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), -100, 100)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1, note=", or None for a random one")
        _check_int("n_probs", self.n_probs, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is a {type(self.logit_bias).__name__}; it must map token ids to numbers")
        for id, bias in self.logit_bias.items():
            _check_int("a token id in logit_bias", id, 0)
            if not (isinstance(bias, Real) and float(bias) == -math.inf):
                _check_number(f"logit_bias[{id}]", bias, -1e9, 1e9)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @classmethod
    def greedy(cls) -> Sampling:
        """Always the most probable token."""
        return cls(temperature=0.0)


class Token(NamedTuple):
    """A chosen token.

    `logprob` and the n-best list `top` (id, log-probability; best first) are the model's own: of the logits as they
    came, before bias, penalties and temperature, over all tokens that are not suppressed.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Best(NamedTuple):
    """The best of a row of logits: ids (k, best first, ties by id), their logits (k), and log(sum(exp(row)))."""

    ids: NDArray[np.int32]
    logits: Logits
    log_sum: float


#: Up to this many of the best, taking them from the device is worth it; beyond, all logits are.
MAX_BEST = 64


class Sampler:
    """Chooses tokens by one `Sampling`. It holds the random stream: one sampler a sequence.

    Randomness is Philox 4x64-10 keyed with the seed, one raw 64-bit number a token, its top 53 bits a double in [0, 1):
    the same for every numpy version and platform. `seed` says which seed was used.
    """

    def __init__(self, sampling: Sampling, n_vocab: int, *, suppressed: Iterable[int] = ()) -> None:
        """`n_vocab` is the number of logits; `suppressed` ids (rows that pad the embedding) are never chosen.

        Raises RequestError for ids outside the vocabulary, or if no token is left.
        """
        _check_int("n_vocab", n_vocab, 1)
        self.sampling = sampling
        self.seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else int(sampling.seed)
        self._n_vocab = n_vocab
        self._suppressed = np.array(sorted(set(suppressed)), np.intp)
        self._biased = np.fromiter(sampling.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        for name, ids in (("suppressed", self._suppressed), ("logit_bias", self._biased)):
            if ids.size and not 0 <= ids.min() <= ids.max() < n_vocab:
                raise RequestError(f"{name} names a token outside the vocabulary's ids 0 to {n_vocab - 1}")
        if sampling.n_probs > n_vocab - self._suppressed.size:
            raise RequestError(f"n_probs is {sampling.n_probs}; the model has {n_vocab - self._suppressed.size} tokens")
        if self._suppressed.size == n_vocab:
            raise RequestError("every token is suppressed")
        self._random: np.random.Philox | None = None  # made at the first draw: greedy choices do without numpy.random
        self._weights = np.empty(n_vocab, np.float32)  # of every token, in each step anew

    def sample(self, logits: Logits, history: Sequence[int] | Ids = ()) -> Token:
        """Choose the next token. `history` is the text so far, prompt included, oldest first. `logits` are not changed.

        Raises NumericsError for NaN or +Inf logits and RequestError for another shape or if bias bans every token.
        """
        logits = np.asarray(logits, np.float32)
        if logits.shape != (self._n_vocab,):
            raise RequestError(f"logits have shape {logits.shape}, expected ({self._n_vocab},)")
        if self._suppressed.size:
            logits = logits.copy()
            logits[self._suppressed] = -np.inf
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise NumericsError(f"the logits hold {logits[best]} at token {best}; there is no distribution to sample")
        changed = self._adjust(logits, history)
        id = int(changed.argmax()) if changed is not logits else best
        if changed[id] == -np.inf:
            raise RequestError("logit_bias bans every token")
        if self.sampling.temperature > 0:
            ids = self._candidates(changed)
            id = self._draw(ids, changed[ids].astype(np.float64))
        return self._describe(id, logits, logits[best])

    @property
    def n_best(self) -> int | None:
        """How many of the best logits are all that it takes (for `choose`), or None where it takes every one."""
        s = self.sampling
        penalized = s.repeat_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
        if self._suppressed.size or self._biased.size or (penalized and s.repeat_last_n):
            return None
        n = max(1 if s.temperature == 0 else s.top_k or self._n_vocab, s.n_probs)
        return n if n <= min(MAX_BEST, self._n_vocab) else None

    def choose(self, best: Best) -> Token:
        """What `sample` gives for the row of logits whose `n_best` best these are. Raises NumericsError as it does."""
        if not np.isfinite(best.logits[0]):
            raise NumericsError(f"the logits hold {best.logits[0]} at token {best.ids[0]}; there is no distribution")
        at = 0
        if self.sampling.temperature > 0:
            k = self.sampling.top_k
            id = self._draw(*self._narrow(best.ids[:k].astype(np.intp), best.logits[:k].astype(np.float64)))
            at = int(np.flatnonzero(best.ids == id)[0])
        logprobs = [float(logit) - best.log_sum for logit in best.logits]
        n = self.sampling.n_probs
        top = tuple(zip(map(int, best.ids[:n]), logprobs[:n], strict=True))
        return Token(int(best.ids[at]), logprobs[at], top)

    def _adjust(self, logits: Logits, history: Sequence[int] | Ids) -> Logits:
        """Logits with bias and penalties; the same array where neither applies."""
        s = self.sampling
        last = len(history) if s.repeat_last_n < 0 else min(s.repeat_last_n, len(history))
        penalized = last > 0 and (s.repeat_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0)
        if not penalized and not self._biased.size:
            return logits
        logits = logits.copy()
        logits[self._biased] += self._bias
        if penalized:
            recent = np.asarray(history[len(history) - last :], np.intp)
            if recent.min() < 0 or recent.max() >= self._n_vocab:
                raise RequestError(f"history holds a token outside the vocabulary's ids 0 to {self._n_vocab - 1}")
            ids, counts = np.unique(recent, return_counts=True)
            logits[ids] = penalize(logits[ids], counts, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
        return logits

    def _draw(self, ids: Ids, values: NDArray[np.float64]) -> int:
        order = np.argsort(ids)  # drawn in the order of ids: the untruncated case needs no other sort
        ids, values = ids[order], values[order]
        sums = np.cumsum(np.exp((values - values.max()) / self.sampling.temperature))
        at = int(np.searchsorted(sums, self._uniform() * sums[-1], side="right"))
        return int(ids[min(at, len(sums) - 1)])

    def _candidates(self, logits: Logits) -> Ids:
        """The ids that top-k, typical, top-p and min-p leave."""
        s = self.sampling
        if not s.top_k and s.typical_p >= 1:
            if s.top_p >= 1:
                values = logits.astype(np.float64)
                return np.flatnonzero(values >= values.max() + math.log(s.min_p)) if s.min_p else np.arange(len(values))
            ids = _top_p_of_all(logits, s.top_p)
        else:
            ids = top_k(logits, s.top_k or self._n_vocab)
            return self._narrow(ids, logits[ids].astype(np.float64))[0]
        return ids[: min_p(logits[ids].astype(np.float64), s.min_p)]

    def _narrow(self, ids: Ids, values: NDArray[np.float64]) -> tuple[Ids, NDArray[np.float64]]:
        """What typical, top-p and min-p leave of candidates (best first)."""
        s = self.sampling
        if s.typical_p < 1:
            keep = typical(values, s.typical_p)
            ids, values = ids[keep], values[keep]
        n = min_p(values[: top_p(values, s.top_p)], s.min_p)
        return ids[:n], values[:n]

    def _uniform(self) -> float:
        if self._random is None:
            self._random = np.random.Philox(key=self.seed)
        return float(int(self._random.random_raw()) >> 11) * 2.0**-53

    def _describe(self, id: int, logits: Logits, best: np.float32) -> Token:
        np.subtract(logits, best, out=self._weights)
        log_sum = float(best) + math.log(float(np.exp(self._weights, out=self._weights).sum(dtype=np.float64)))
        top = tuple((int(i), float(logits[i]) - log_sum) for i in top_k(logits, self.sampling.n_probs or 0))
        return Token(id, float(logits[id]) - log_sum, top)


def penalize(values: Logits, counts: Ids, repeat: float, frequency: float, presence: float) -> Logits:
    """Penalties of tokens seen `counts` times (CTRL's repeat penalty; OpenAI's frequency and presence penalties)."""
    values = np.where(values > 0, values / np.float32(repeat), values * np.float32(repeat))
    return (values - counts * np.float32(frequency) - np.float32(presence)).astype(np.float32)


def top_k(logits: Logits, k: int) -> Ids:
    """Ids of the k largest logits, best first, ties by id. No copy and no sort of the vocabulary."""
    k = min(k, len(logits))
    if k == 0:
        return np.empty(0, np.intp)
    width = len(logits) // (8 * k)
    if width > 1:
        # The k-th best of the maxima of 8 k groups is not above the k-th best of all.
        maxima = logits[: 8 * k * width].reshape(8 * k, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, 7 * k)[7 * k])
    else:
        ids = np.arange(len(logits))
    order: Ids = ids[np.argsort(-logits[ids], kind="stable")][:k]
    return order


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def top_p(values: NDArray[np.float64], p: float) -> int:
    """How many of the candidates (best first) reach probability p together: the nucleus (Holtzman et al., 2019)."""
    if p >= 1:
        return len(values)
    return min(int(np.searchsorted(np.cumsum(_softmax(values)), p)) + 1, len(values))


def _top_p_of_all(logits: Logits, p: float) -> Ids:
    """Top-p of the whole vocabulary: sorts only as many of the best as the nucleus turns out to need."""
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    total = weights.sum()
    k = min(1024, len(logits))
    while True:
        ids = top_k(logits, k)
        reached = np.cumsum(weights[ids]) / total
        if reached[-1] >= p or k == len(logits):
            return ids[: int(np.searchsorted(reached, p)) + 1]
        k = min(k * 8, len(logits))


def min_p(values: NDArray[np.float64], p: float) -> int:
    """How many of the candidates (best first) have at least p times the best one's probability."""
    if p <= 0:
        return len(values)
    return max(int(np.count_nonzero(values >= values[0] + math.log(p))), 1)


def typical(values: NDArray[np.float64], p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the candidates whose surprise is nearest the entropy, up to probability p together.

    Locally typical sampling (Meister et al., 2022). A candidate of probability 0 is never typical.
    """
    probabilities = _softmax(values)
    possible = np.flatnonzero(probabilities > 0)
    surprise = -np.log(probabilities[possible])
    entropy = float((probabilities[possible] * surprise).sum())
    order = possible[np.argsort(np.abs(surprise - entropy), kind="stable")]
    n = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right")) + 1
    return np.sort(order[:n])
