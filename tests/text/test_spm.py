"""SPM: the merge rule against its definition, the cache, the space prefix, and the work a long text makes."""

from __future__ import annotations

import itertools
import random
from heapq import heappop

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_data import GEMMA, tiny_spm, tokenizer

from minfer.errors import RequestError
from minfer.text import Tokenizer, spm

PIECES = {
    "▁": -9.0,
    "a": -9.0,
    "b": -9.0,
    "c": -9.0,
    "s": -9.0,
    ">": -9.0,
    "<": -9.0,
    "é": -9.0,
    "ab": -1.0,
    "bc": -0.5,
    "abc": -3.0,
    "aa": -2.0,
    "aaaa": -2.0,
    "▁a": -1.5,
    "▁ab": -4.0,
    "▁▁": -0.2,
    "▁▁▁▁": -0.3,
    "b▁c": -5.0,
    "b▁": -4.5,
    "<s": -1.0,
    "éé": -1.0,
}
METADATA = tiny_spm(PIECES, add_space_prefix=False, add_bos_token=False)
TINY = Tokenizer.from_metadata(METADATA)
FIRST = 259  # the id of the first piece


def slow_spm(text: str) -> list[int]:
    """Merge the best-scored pair anywhere, leftmost first, until none is left: the definition."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-PIECES[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    names = list(PIECES)
    ids: list[int] = []
    for part in parts:
        ids += [FIRST + names.index(part)] if part in PIECES else [3 + byte for byte in part.encode()]
    return ids


TEXTS = st.text(alphabet="abc s<>é\n", max_size=60) | st.text(max_size=20)


@given(TEXTS)
def test_merges_equal_the_definition(text):
    assert TINY.encode(text, parse_special=False) == slow_spm(text)


@given(st.lists(TEXTS, max_size=4))
def test_a_warm_cache_changes_nothing(texts):
    for text in texts * 2:
        assert TINY.encode(text, parse_special=False) == slow_spm(text)


def test_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(spm, "_CACHED_WORDS", 4)
    tok = Tokenizer.from_metadata(METADATA)
    for n in range(40):
        tok.encode(" " + "abc" * n)
        assert len(tok._cache) <= 4


def test_words_are_cut_only_where_no_piece_reaches_across():
    assert TINY._words.split("a▁▁a▁b▁c▁a") == ["a", "▁▁a", "▁b▁c", "▁a"]  # "b▁c" is a piece, so is "b▁"
    assert tokenizer(GEMMA)._words.split("x>▁</▁</y▁z") == ["x>▁</", "▁</y", "▁z"]  # Gemma has ">▁</"


def test_text_never_becomes_a_control_or_byte_token():
    assert TINY.encode("<s>", parse_special=True) == [1]
    assert TINY.encode("<s>", parse_special=False) == slow_spm("<s>")
    base = tiny_spm(PIECES | {"<0": -1.0, "<0x": -1.0, "<0x4": -1.0, "<0x41": -1.0}, add_space_prefix=False)
    tok = Tokenizer.from_metadata(base)
    assert 3 + 0x41 not in tok.encode("<0x41>", add_special=False)


def test_space_prefix_and_bos_as_the_file_says():
    def encode(text, **extra):
        tok = Tokenizer.from_metadata(tiny_spm(PIECES, **extra))
        return [tok.piece(id).decode() for id in tok.encode(text)]

    assert encode("ab") == ["<s>", "▁ab"]
    assert encode("ab", add_space_prefix=False) == ["<s>", "ab"]
    assert encode("ab", add_bos_token=False, add_eos_token=True) == ["▁ab", "</s>"]
    assert encode("") == ["<s>"]
    assert encode("ab</s>ab</s> ab") == ["<s>", "▁ab", "</s>", "▁ab", "</s>", "▁▁", "ab"]


def test_byte_fallback_unknown_and_refusal():
    assert TINY.encode("€") == [3 + byte for byte in "€".encode()]
    assert TINY.token_bytes(3 + 0xE2) == b"\xe2"
    assert TINY.decode(TINY.encode("a€😀")) == "a€😀"
    tokens = {"<unk>": 2, "<s>": 3, "</s>": 3, "a": 1}
    bare = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
        "tokenizer.ggml.scores": [0.0] * 4,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert Tokenizer.from_metadata(bare).encode("a€") == [1, 3, 0]
    no_unknown = {
        **bare,
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>", "b"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],
    }
    assert Tokenizer.from_metadata(no_unknown).encode("ab") == [1, 0, 3]
    with pytest.raises(RequestError, match="no token, no bytes and no unknown token for '€'"):
        Tokenizer.from_metadata(no_unknown).encode("a€")


LONG = {
    "equal": "a" * 131_072,
    "letters": "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=26_000)),
    "cjk": "".join(map(chr, random.Random(2).choices(range(0x4E00, 0x9E00), k=40_000))),
    "spaces": " " * 131_072,
    "carets": "^" * 1_000_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_work_is_linear(text, monkeypatch):
    """Every merge adds at most two pairs and takes one symbol away: at most 3 heap pops a character, of any text.

    A pair is no longer than two pieces, so each pop and look-up is bounded too.
    """
    pops = longest = 0

    def count(heap):
        nonlocal pops, longest
        pops += 1
        longest = max(longest, heap[0][2] - heap[0][1])
        return heappop(heap)

    monkeypatch.setattr(spm, "heappop", count)
    tok = tokenizer("llama-spm")
    assert tok.decode(tok.encode(text, add_special=False)) == " " + text
    assert pops <= 3 * len(text)
    assert longest <= 2 * max(len(piece) for piece in tok._pieces)
