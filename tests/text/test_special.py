"""Special tokens in text: which are read, which wins where they overlap, and in linear time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from vocab_data import GEMMA, tiny_bpe, tiny_spm, tokenizer

from minfer.text import Tokenizer

CONTROL, USER = ["<s>", "<s>x", "<|a|>", "<|a|><|b|>", "|b"], ["\n\n", "\n\n\n\n", "ab"]
TINY = Tokenizer.from_metadata(tiny_bpe([], control=CONTROL, user=USER))


def slow_split(text: str, specials: list[str]) -> list[str]:
    """At each position the longest special token that starts there: the definition."""
    parts, plain = [], ""
    at = 0
    while at < len(text):
        here = max((s for s in specials if text.startswith(s, at)), key=len, default="")
        if here:
            parts += [plain, here]
            plain = ""
        else:
            plain += text[at]
        at += len(here) or 1
    return [part for part in [*parts, plain] if part]


@given(st.lists(st.sampled_from([*CONTROL, *USER, *"<s>x|ab\n"]), max_size=16).map("".join), st.booleans())
def test_leftmost_longest(text, parse):
    specials = CONTROL * parse + USER
    expected: list[int] = []
    for part in slow_split(text, specials):
        expected += [256 + (CONTROL + USER).index(part)] if part in specials else list(part.encode())
    # a tiny vocabulary without merges: plain text is its bytes, printed characters being their own ids
    found = [tok if tok >= 256 else TINY.token_bytes(tok)[0] for tok in TINY.encode(text, parse_special=parse)]
    assert found == expected


def test_bytes_of_special_tokens_are_given_only_when_asked():
    ids = TINY.encode("a<s>ab")
    assert TINY.decode(ids) == "aab"
    assert TINY.decode(ids, special=True) == "a<s>ab"
    assert [TINY.is_special(id) for id in ids] == [False, True, False]
    assert TINY.special_id("<s>") == 256
    assert TINY.special_id("ab") == 263
    assert TINY.special_id("a") is None
    assert TINY.special_id("zzz") is None


def test_phi3_tokens_swallow_the_white_space_that_follows():
    """As Phi-3's published tokenizer does; <s>, <unk> and <|endoftext|> do not."""
    base = tiny_spm({"▁": -1.0, "a": -2.0}, user=["<|end|>"], add_space_prefix=False, add_bos_token=False)
    base["tokenizer.ggml.token_type"][-1] = 3
    phi = Tokenizer.from_metadata(base | {"general.name": "Phi-3 mini"})
    assert phi.encode("<|end|> \n a<s> a") == [261, 260, 1, 259, 260]
    assert Tokenizer.from_metadata(base).encode("<|end|> a") == [261, 259, 260]


def test_lone_surrogates_become_replacement_characters():
    assert TINY.decode(TINY.encode("x\ud800y\udfff")) == "x\ufffdy\ufffd"


class Counting(dict):
    steps = 0

    def get(self, key, default=None):
        Counting.steps += 1
        return super().get(key, default)


def test_the_walk_is_linear():
    """Trie steps a character stay below the longest special token, even where every character starts one."""
    tok = tokenizer(GEMMA)
    root, first = tok._special._build()

    def counted(node):
        return Counting({k: counted(v) if isinstance(v, dict) else v for k, v in node.items()})

    splitter = tok._special
    splitter._built = counted(root), first
    try:
        for text in ("<" * 50_000, "\n" * 50_000, "<unused" * 8_000, "<start_of_" * 5_000, "[multimoda" * 5_000):
            Counting.steps = 0
            parts = list(splitter.split(text))
            assert "".join(p if isinstance(p, str) else tok.piece(p).decode() for p in parts) == text
            assert Counting.steps <= 2 * len(text)
    finally:
        splitter._built = root, first


def test_many_special_tokens_in_one_text():
    tok = tokenizer(GEMMA)
    pick = random.Random(3)
    ids = [pick.choice([2, 105, 106, 107, 108, 6, 255999]) for _ in range(300)]
    text = tok.decode(ids, special=True)
    assert tok.decode(tok.encode(text, add_special=False), special=True) == text
