"""The sampler chain: every step against a slow, obvious one, then the whole."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.engine import sampler as chain
from minfer.engine.sampler import Sampler, Sampling, Token
from minfer.errors import MinferError, NumericsError, RequestError

LOGITS = st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=40)
# Off the grid of any sum of equal probabilities, where the last bit would decide.
SHARE = st.integers(1, 998).map(lambda n: n / 1000 + 1e-5 * math.pi)


def array(values) -> np.ndarray:
    return np.array(values, np.float32)


def slow_softmax(values: list[float]) -> list[float]:
    largest = max(values)
    weights = [math.exp(v - largest) for v in values]
    total = math.fsum(weights)
    return [w / total for w in weights]


def best_first(logits: list[float], ids: list[int]) -> list[int]:
    return sorted(ids, key=lambda id: (-logits[id], id))


def slow_top_k(logits, ids, k):
    return ids[:k] if k else ids


def slow_typical(logits, ids, p):
    if p >= 1:
        return ids
    shares = slow_softmax([logits[id] for id in ids])
    entropy = -math.fsum(s * math.log(s) for s in shares if s)
    order = sorted((abs(-math.log(s) - entropy), i) for i, s in enumerate(shares) if s)
    kept, total = [], 0.0
    for _, i in order:
        kept.append(i)
        total += shares[i]
        if total > p:
            break
    return [ids[i] for i in sorted(kept)]


def slow_top_p(logits, ids, p):
    kept, total = [], 0.0
    for id, share in zip(ids, slow_softmax([logits[id] for id in ids]), strict=True):
        kept.append(id)
        total += share
        if p < 1 and total >= p:
            break
    return kept


def slow_min_p(logits, ids, p):
    return [id for id in ids if p == 0 or math.exp(logits[id] - logits[ids[0]]) >= p] or ids[:1]


def slow_candidates(logits: list[float], s: Sampling) -> list[int]:
    ids = best_first(logits, list(range(len(logits))))
    ids = slow_top_k(logits, ids, s.top_k)
    ids = slow_typical(logits, ids, s.typical_p)
    ids = slow_top_p(logits, ids, s.top_p)
    return slow_min_p(logits, ids, s.min_p)


def slow_draw(logits: list[float], s: Sampling, u: float) -> int:
    ids = sorted(slow_candidates(logits, s))
    shares = slow_softmax([logits[id] / s.temperature for id in ids])
    total = 0.0
    for id, share in zip(ids, shares, strict=True):
        total += share
        if total > u:
            return id
    return ids[-1]


def slow_penalties(logits: list[float], history: list[int], s: Sampling) -> list[float]:
    out = [value + s.logit_bias.get(id, 0.0) for id, value in enumerate(logits)]
    recent = history if s.repeat_last_n < 0 else history[max(len(history) - s.repeat_last_n, 0) :]
    for id, count in Counter(recent).items():
        out[id] = out[id] / s.repeat_penalty if out[id] > 0 else out[id] * s.repeat_penalty
        out[id] -= count * s.frequency_penalty + s.presence_penalty
    return out


@given(LOGITS, st.integers(1, 50))
def test_top_k(logits, k):
    expected = best_first(logits, list(range(len(logits))))[:k]
    assert chain.top_k(array(logits), k).tolist() == expected


@given(LOGITS, SHARE)
def test_top_p(logits, p):
    ids = best_first(logits, list(range(len(logits))))
    assert chain.top_p(np.array([logits[id] for id in ids]), p) == len(slow_top_p(logits, ids, p))
    assert chain._top_p_of_all(array(logits), p).tolist() == slow_top_p(logits, ids, p)


@given(LOGITS, SHARE)
def test_min_p(logits, p):
    ids = best_first(logits, list(range(len(logits))))
    kept = slow_min_p(logits, ids, p)
    assert chain.min_p(np.array([logits[id] for id in ids]), p) == len(kept)
    alone = Sampler(Sampling(top_k=0, top_p=1.0, min_p=p), len(logits))  # finds them without sorting
    assert alone._candidates(array(logits)).tolist() == sorted(kept)


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40, unique=True), SHARE)
def test_typical(logits, p):
    ids = best_first(logits, list(range(len(logits))))
    kept = chain.typical(np.array([logits[id] for id in ids]), p)
    expected = slow_typical(logits, ids, p)
    found = [ids[i] for i in kept]
    if found != expected:  # two candidates equally far from the entropy may swap in the last bit
        shares = slow_softmax(logits)
        assert len(found) == len(expected)
        assert sum(shares[i] for i in found) == pytest.approx(sum(shares[i] for i in expected), abs=1e-6)


def test_typical_by_hand():
    # p = 1/2, 1/4, 1/8, 1/8: entropy 1.75 bits; distances 0.75, 0.25, 1.25, 1.25 bits
    values = np.log(np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8]))
    assert chain.typical(values, 0.2).tolist() == [1]
    assert chain.typical(values, 0.3).tolist() == [0, 1]
    assert chain.typical(values, 0.8).tolist() == [0, 1, 2]
    assert chain.typical(values, 0.999).tolist() == [0, 1, 2, 3]


def test_top_p_beyond_the_first_partition():
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(20_000).astype(np.float32)
    for p in (0.1, 0.5, 0.9, 0.99, 0.9999):
        ids = best_first(logits.tolist(), list(range(len(logits))))
        assert chain._top_p_of_all(logits, p).tolist() == slow_top_p(logits.tolist(), ids, p)


STEPS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.just(0) | st.integers(1, 45),
        "top_p": st.just(1.0) | SHARE,
        "min_p": SHARE | st.just(0.0),
        "temperature": st.floats(0.05, 5),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@settings(max_examples=300)
@given(LOGITS, STEPS)
def test_the_whole_chain_draws_what_the_slow_one_draws(logits, steps):
    s = Sampling(**{"seed": 1, **steps})
    fast = Sampler(s, len(logits))
    assert sorted(fast._candidates(array(logits)).tolist()) == sorted(slow_candidates(logits, s))
    random_numbers = np.random.Philox(key=s.seed)
    for _ in range(3):
        u = (int(random_numbers.random_raw()) >> 11) / 2**53
        assert fast.sample(array(logits)).id == slow_draw(logits, s, u)


@given(
    LOGITS,
    st.lists(st.integers(0, 39), max_size=80),
    st.sampled_from([1.0, 1.25, 0.5, 2.0]),
    st.sampled_from([0.0, 0.5, -0.25, 2.0]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([-1, 0, 1, 7, 64]),
    st.dictionaries(st.integers(0, 39), st.sampled_from([1.0, -2.5, 100.0]), max_size=4),
)
def test_penalties_and_bias(logits, history, repeat, frequency, presence, last_n, bias):
    n = len(logits)
    s = Sampling(
        temperature=0,
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repeat_last_n=last_n,
        logit_bias={id % n: value for id, value in bias.items()},
    )
    history = [id % n for id in history]
    expected = slow_penalties(logits, history, s)
    given_logits = array(logits)
    for form in (history, tuple(history), np.array(history, np.int64)):
        found = Sampler(s, n)._adjust(given_logits, form)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert given_logits.tolist() == logits  # the caller's logits are not changed


@given(LOGITS)
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(logits):
    expected = min(range(len(logits)), key=lambda id: (-logits[id], id))
    assert Sampler(Sampling.greedy(), len(logits)).sample(array(logits)).id == expected


def test_greedy_sorts_nothing(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("greedy sorted the vocabulary")

    for name in ("sort", "argsort", "partition", "argpartition"):
        monkeypatch.setattr(np, name, forbidden)
    assert Sampler(Sampling.greedy(), 4).sample(array([0, 3, 1, 3])).id == 1


@given(LOGITS, st.integers(0, 5))
def test_log_probabilities_are_the_models_own(logits, n):
    n = min(n, len(logits))
    s = Sampling(temperature=0.3, top_k=2, logit_bias={0: -5.0}, n_probs=n, seed=4)
    token = Sampler(s, len(logits)).sample(array(logits), history=[0])
    shares = slow_softmax(logits)
    assert token.logprob == pytest.approx(math.log(shares[token.id]), abs=1e-5)
    ids = best_first(logits, list(range(len(logits))))[:n]
    assert [id for id, _ in token.top] == ids
    assert [p for _, p in token.top] == pytest.approx([math.log(shares[id]) for id in ids], abs=1e-5)


def test_suppressed_rows_are_never_chosen_and_take_no_probability():
    logits = array([0, 0, 50, 60])
    for s in (Sampling.greedy(), Sampling(seed=3, top_k=0, top_p=1.0, min_p=0.0), Sampling(seed=3)):
        sampler = Sampler(s, 4, suppressed=range(2, 4))
        tokens = [sampler.sample(logits) for _ in range(50)]
        assert {token.id for token in tokens} <= {0, 1}
        assert tokens[0].logprob == pytest.approx(math.log(0.5))
    with_top = Sampler(Sampling(n_probs=2), 4, suppressed=[2, 3]).sample(logits)
    assert [id for id, _ in with_top.top] == [0, 1]
    assert logits.tolist() == [0, 0, 50, 60]


def test_distribution():
    """20,000 draws from known shares: each count within five standard deviations."""
    shares = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    s = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=7)
    sampler, n = Sampler(s, 5), 20_000
    counts = Counter(sampler.sample(array(np.log(shares))).id for _ in range(n))
    for id, share in enumerate(shares):
        assert abs(counts[id] - n * share) < 5 * math.sqrt(n * share * (1 - share))


def test_same_seed_same_tokens_and_the_stream_is_the_stated_one():
    logits = np.random.default_rng(1).standard_normal(1000).astype(np.float32)

    def run(seed):
        sampler = Sampler(Sampling(seed=seed, temperature=1.5), 1000)
        return [sampler.sample(logits).id for _ in range(20)]

    assert run(11) == run(11)
    assert run(11) != run(12)
    # Philox 4x64-10, key (seed, 0), counter from 1: worked out with the rounds written down
    assert Sampler(Sampling(seed=2024), 10)._uniform() == (philox(2024) >> 11) / 2**53
    last = Sampler(Sampling(), 10)
    last._random = type("AllOnes", (), {"random_raw": lambda self: np.uint64(2**64 - 1)})()
    assert last._uniform() < 1
    drawn = Sampler(Sampling(), 10)
    assert 0 <= drawn.seed < 2**64
    again = Sampler(Sampling(seed=drawn.seed), 10)
    assert [drawn._uniform() for _ in range(3)] == [again._uniform() for _ in range(3)]


def philox(seed: int) -> int:
    """The first 64 bits of Philox 4x64-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    mask = 2**64 - 1
    counter, key = [1, 0, 0, 0], [seed, 0]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [(b >> 64) ^ counter[1] ^ key[0], b & mask, (a >> 64) ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter[0]


def test_temperature_extremes():
    logits = array([1, 2, 2.001, -50])
    cold = Sampler(Sampling(temperature=1e-30, seed=1), 4)
    assert {cold.sample(logits).id for _ in range(20)} == {2}
    hot = Sampler(Sampling(temperature=1e30, top_k=0, top_p=1, min_p=0, seed=1), 4)
    assert {hot.sample(logits).id for _ in range(100)} == {0, 1, 2, 3}


def test_bans():
    logits = array([5, 4, 3])
    assert Sampler(Sampling(temperature=0, logit_bias={0: -math.inf}), 3).sample(logits).id == 1
    ban = Sampler(Sampling(top_k=0, top_p=1, min_p=0, logit_bias={0: -math.inf, 1: -math.inf}, seed=1), 3)
    assert {ban.sample(logits).id for _ in range(30)} == {2}
    with pytest.raises(RequestError, match="logit_bias bans every token"):
        Sampler(Sampling(logit_bias=dict.fromkeys(range(3), -math.inf)), 3).sample(logits)
    masked = array([-np.inf, 1, -np.inf])
    for s in (Sampling(seed=1, top_k=0, typical_p=0.9), Sampling(seed=1, top_k=0), Sampling(n_probs=3)):
        assert Sampler(s, 3).sample(masked).id == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_distribution(bad):
    for s in (Sampling.greedy(), Sampling()):
        with pytest.raises(NumericsError, match=r"logits hold (nan|inf) at token 2"):
            Sampler(s, 4).sample(array([1, 2, bad, 3]))
    with pytest.raises(NumericsError, match="logits hold -inf"):
        Sampler(Sampling(), 2).sample(array([-np.inf, -np.inf]))


BAD = [
    ({"temperature": -0.1}, "temperature is -0.1; it must be a number 0 or more"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": True}, "temperature is True"),
    ({"top_k": -1}, "top_k is -1; it must be a whole number of 0 or more (0: all tokens)"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"top_p": 1.01}, "top_p is 1.01; it must be a number from 0 to 1"),
    ({"top_p": -0.1}, "top_p is -0.1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"typical_p": None}, "typical_p is None"),
    ({"repeat_penalty": 0}, "repeat_penalty is 0; it must be a number above 0"),
    ({"repeat_last_n": -2}, "repeat_last_n is -2; it must be a whole number of -1 or more (-1: the whole text)"),
    ({"frequency_penalty": 101}, "frequency_penalty is 101; it must be a number from -100 to 100"),
    ({"presence_penalty": math.inf}, "presence_penalty is inf"),
    ({"seed": -1}, f"seed is -1; it must be a whole number from 0 to {2**64 - 1}, or None for a random one"),
    ({"seed": 2**64}, f"seed is {2**64}"),
    ({"n_probs": -1}, "n_probs is -1"),
    ({"logit_bias": [1]}, "logit_bias is a list; it must map token ids to numbers"),
    ({"logit_bias": {"a": 1}}, "a token id in logit_bias is 'a'"),
    ({"logit_bias": {-1: 1}}, "a token id in logit_bias is -1"),
    ({"logit_bias": {1: math.inf}}, "logit_bias[1] is inf"),
    ({"logit_bias": {1: math.nan}}, "logit_bias[1] is nan"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_values_are_refused_by_name(fields, message):
    with pytest.raises(RequestError) as caught:
        Sampling(**fields)
    assert message in str(caught.value)
    assert isinstance(caught.value, MinferError)


def test_numpy_numbers_are_numbers_and_the_bias_is_a_copy():
    bias = {np.int64(1): np.float32(2)}
    s = Sampling(temperature=np.float32(0.5), top_k=np.int32(3), seed=np.uint64(5), logit_bias=bias)
    bias.clear()
    assert s.logit_bias == {1: 2.0}
    assert Sampler(s, 4).sample(array([0, 0, 0, 0])).id in range(4)


def test_wrong_calls():
    with pytest.raises(RequestError, match=r"logits have shape \(3,\), expected \(4,\)"):
        Sampler(Sampling(), 4).sample(array([1, 2, 3]))
    for make in (lambda: Sampler(Sampling(logit_bias={4: 1.0}), 4), lambda: Sampler(Sampling(), 4, suppressed=[4])):
        with pytest.raises(RequestError, match="names a token outside the vocabulary's ids 0 to 3"):
            make()
    with pytest.raises(RequestError, match="every token is suppressed"):
        Sampler(Sampling(), 2, suppressed=[0, 1])
    with pytest.raises(RequestError, match="n_probs is 4; the model has 3 tokens"):
        Sampler(Sampling(n_probs=4), 4, suppressed=[1])
    with pytest.raises(RequestError, match="history holds a token outside"):
        Sampler(Sampling(repeat_penalty=1.5), 4).sample(array([1, 2, 3, 4]), [4])


def test_large_vocabulary_in_every_mode():
    rng = random.Random(3)
    logits = np.random.default_rng(3).standard_normal(262_144).astype(np.float32) * 3
    for s in (
        Sampling(seed=1),
        Sampling(seed=1, top_k=0),
        Sampling(seed=1, top_k=0, top_p=1.0),
        Sampling(seed=1, top_k=0, top_p=1.0, min_p=0.0),
        Sampling(seed=1, top_k=0, typical_p=0.9),
    ):
        token = Sampler(s, 262_144).sample(logits, [rng.randrange(262_144) for _ in range(100)])
        assert isinstance(token, Token)
        assert token.logprob < 0


# --- from the best of a row alone ----------------------------------------------------------------------------------


def best_of(logits: np.ndarray, k: int) -> chain.Best:
    """By a full sort."""
    ids = np.array(best_first(logits.tolist(), list(range(len(logits))))[:k], np.int32)
    return chain.Best(ids, logits[ids], math.log(math.fsum(math.exp(float(v)) for v in logits)))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "n_probs": 7},
        {"seed": 1},
        {"seed": 2, "top_k": 5, "typical_p": 0.6, "n_probs": 3},
        {"seed": 3, "top_k": 50, "top_p": 0.5, "min_p": 0.0},
        {"seed": 4, "top_k": 1},
    ],
)
def test_the_best_logits_choose_what_all_of_them_do(sampling) -> None:
    rng = np.random.default_rng(0)
    one, other = (Sampler(Sampling(**sampling), 300) for _ in range(2))
    assert one.n_best == max(1 if not sampling.get("temperature", 1) else one.sampling.top_k, one.sampling.n_probs)
    for _ in range(20):
        logits = array(np.round(rng.standard_normal(300) * 6) / 2)  # ties
        got, want = one.choose(best_of(logits, one.n_best)), other.sample(logits)
        assert got.id == want.id
        assert [id for id, _ in got.top] == [id for id, _ in want.top]
        assert [got.logprob, *(p for _, p in got.top)] == pytest.approx([want.logprob, *(p for _, p in want.top)])


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 0},
        {"top_k": 65},
        {"temperature": 0.0, "n_probs": 65},
        {"logit_bias": {3: 1.0}},
        {"repeat_penalty": 1.1},
        {"presence_penalty": 0.5},
    ],
)
def test_what_looks_beyond_the_best_takes_all_logits(sampling) -> None:
    assert Sampler(Sampling(**sampling), 300).n_best is None
    assert Sampler(Sampling.greedy(), 300, suppressed=[299]).n_best is None
    assert Sampler(Sampling(repeat_penalty=1.1, repeat_last_n=0), 300).n_best == 40
    assert Sampler(Sampling(), 30).n_best is None


def test_the_best_of_a_row_with_nan_are_refused() -> None:
    with pytest.raises(NumericsError, match="the logits hold nan at token 3"):
        Sampler(Sampling.greedy(), 8).choose(chain.Best(np.array([3], np.int32), array([math.nan]), 0.0))
