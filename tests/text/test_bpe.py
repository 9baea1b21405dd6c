"""Byte-level BPE: the words that each pre-tokenizer cuts, the merges, and time linear in the text."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_data import SMOLLM, byte_alphabet, tiny_bpe, tokenizer

from minfer.text import Tokenizer, pretokenizers
from minfer.text.bpe import build_pre_tokenizer
from minfer.text.pretokenizers import PRE_TOKENIZERS

TEXT = "I've got   12345 apples, Él'LL win!! \n\nfooBAR  "
# Worked out by hand from the published expressions.
WORDS = {
    "gpt-2": "I|'ve| got|  | 12345| apples|,| Él|'|LL| win|!!| \n|\n|fooBAR|  ",
    "smollm": "I|'ve| got|   |1|2|3|4|5| apples|,| Él|'|LL| win|!!| \n|\n|fooBAR|  ",
    "llama-bpe": "I|'ve| got|  | |123|45| apples|,| Él|'LL| win|!!| \n\n|fooBAR|  ",
    "qwen2": "I|'ve| got|  | |1|2|3|4|5| apples|,| Él|'LL| win|!!| \n\n|fooBAR|  ",
    "qwen35": "I|'ve| got|  | |1|2|3|4|5| apples|,| Él|'LL| win|!!| \n\n|fooBAR|  ",
    "tekken": "I|'ve| got|  | |1|2|3|4|5| apples|,| Él|'LL| win|!!| \n\n|foo|BAR|  ",
    "gpt-4o": "I've| got|  | |123|45| apples|,| Él'LL| win|!!| \n\n|foo|BAR|  ",
    "default": "I|'|ve| got|  | |123|45| apples|,| Él|'|LL| win|!!| \n|\n|fooBAR|  ",
    "falcon": "I|'|ve| got|  | |123|45| apples|,| Él|'|LL| win|!!| \n|\n|fooBAR|  ",
    # The published punctuation class runs from ":" to "~", letters included: an accent cuts a word.
    "deepseek-llm": "I|'|ve| got|   |12345| apples|,| É|l|'|LL| win|!!| |\n|\n|fooBAR|  ",
    "deepseek-coder": "I|'|ve| got|   |1|2|3|4|5| apples|,| Él|'|LL| win|!!| |\n|\n|fooBAR|  ",
}


@functools.cache
def cutter(pre: str):
    return build_pre_tokenizer(PRE_TOKENIZERS[pre])


def words(pre: str, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in cutter(pre).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", WORDS)
def test_words(pre):
    assert "|".join(words(pre, TEXT)) == WORDS[pre]


def test_deepseek_letters():
    """All are cased letters, and those that normalization would have changed are still themselves."""
    letters = re.compile(f"[{pretokenizers._DEEPSEEK_LETTERS}]")
    found = [chr(code) for code in range(0x110000) if letters.match(chr(code))]
    assert len(found) == 2729
    assert {unicodedata.category(char) for char in found} == {"Lu", "Ll", "Lt"}
    assert set("\u1f7d\u1fbe\u1fd3\u1fdb\u2126\u212a") <= set(found)


MARKS = "हिन्दी 한국어"


def test_marks_stay_with_their_letters_where_the_expression_says_so():
    assert words("qwen2", MARKS) == ["ह", "िन", "्द", "ी", " 한국어"]
    assert words("qwen35", MARKS) == ["हिन्दी", " 한국어"]


def test_aliases_share_one_rule():
    for name, alias in [
        ("gpt-2", "phi-2"),
        ("gpt-2", "mpt"),
        ("smollm", "starcoder"),
        ("smollm", "refact"),
        ("smollm", "command-r"),
        ("qwen2", "deepseek-r1-qwen"),
        ("llama-bpe", "llama3"),
        ("llama-bpe", "llama-v3"),
    ]:
        assert PRE_TOKENIZERS[alias] is PRE_TOKENIZERS[name]
    added_bos = {name for name, pre in PRE_TOKENIZERS.items() if pre.add_bos}
    assert {"llama-bpe", "tekken"} <= added_bos == {name for name, pre in PRE_TOKENIZERS.items() if pre.ignore_merges}


def test_bos_default_comes_from_the_pre_tokenizer_and_the_file_overrides():
    base = tiny_bpe([], bos_token_id=0, eos_token_id=1, pre="llama-bpe")
    assert Tokenizer.from_metadata(base).encode("a") == [0, 97]
    assert Tokenizer.from_metadata(base).encode("a", add_special=False) == [97]
    assert Tokenizer.from_metadata({**base, "tokenizer.ggml.add_bos_token": False}).encode("a") == [97]
    assert Tokenizer.from_metadata({**base, "tokenizer.ggml.add_eos_token": True}).encode("") == [0, 1]


def test_a_whole_word_is_taken_before_merges_where_the_rule_says_so():
    base = tiny_bpe(["a b", "b c"], user=["abc"])
    base["tokenizer.ggml.token_type"][-1] = 1  # "abc" is a token that no merge makes
    assert Tokenizer.from_metadata({**base, "tokenizer.ggml.pre": "llama3"}).encode("abc", add_special=False) == [258]
    assert Tokenizer.from_metadata(base).encode("abc") == [256, 99]


MERGES = ["a b", "b c", "ab c", "c c", "cc cc", "Ġ a", "Ġa b", "a a", "aa aa", "bc a", "é b"]
MERGES[-1] = "Ã ©"  # the two bytes of é
TINY = Tokenizer.from_metadata(tiny_bpe(MERGES, control=["<s>"], user=["<u>"]))


def slow_bpe(text: str) -> list[int]:
    """Merge the best-ranked pair anywhere, leftmost first, until none is left: the definition."""
    alphabet = byte_alphabet()
    vocab = {t: i for i, t in enumerate(alphabet)} | {m.replace(" ", ""): 256 + i for i, m in enumerate(MERGES)}
    ids = []
    for word in words("gpt-2", text):
        parts = [alphabet[b] for b in word.encode()]
        while True:
            pairs = [f"{a} {b}" for a, b in itertools.pairwise(parts)]
            found = [MERGES.index(pair) for pair in pairs if pair in MERGES]
            if not found:
                break
            at = pairs.index(MERGES[min(found)])
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [vocab[part] for part in parts]
    return ids


@given(st.text(alphabet="abcé <s>u\n1", max_size=60) | st.text(max_size=30))
def test_merges_equal_the_definition(text):
    assert TINY.encode(text.replace("<", ""), parse_special=False) == slow_bpe(text.replace("<", ""))


@given(st.text(max_size=60))
def test_decoding_gives_the_text_back(text):
    tok = tokenizer("gpt-2")
    assert tok.decode(tok.encode(text), special=True) == text


def test_bytes_without_a_token_are_left_out():
    assert tokenizer(SMOLLM).encode("a\x13b") == tokenizer(SMOLLM).encode("a") + tokenizer(SMOLLM).encode("b")


GUARD = """
import random, sys
sys.path.insert(0, {here!r})
from vocab_data import metadata
from minfer.text import Tokenizer, pretokenizers

random.seed(1)
whole = {{
    "equal": "a" * 131072,
    "letters": "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=26000)),
    "cjk": "".join(map(chr, random.choices(range(0x4E00, 0x9E00), k=40000))),
    "spaces": " " * 131072,
    "spaces, digit": " " * 131072 + "1",
    "wide spaces, mark": "\\u3000" * 131072 + "\\u0301",
    "marks": "\\u0301" * 131072,
    "carets": "^" * 1_000_000,
}}
short = {{name: text[-16384:] for name, text in whole.items()}}
base = metadata("gpt-2")
for pre in {pres!r}:
    tok = Tokenizer.from_metadata({{**base, "tokenizer.ggml.pre": pre}})
    for name, text in (whole if pre == "gpt-2" else short).items():
        print(pre, name, flush=True)
        assert tok.decode(tok.encode(text)) == text
tok = Tokenizer.from_metadata({{**base, "tokenizer.ggml.pre": "deepseek-llm"}})
tok.encode(whole["spaces, digit"])
print("done")
"""


def test_long_texts_do_not_hang():
    """The library offers no count of its steps, so this only guards against a hang: quadratic time takes minutes."""
    pres = sorted({id(pre): name for name, pre in reversed(PRE_TOKENIZERS.items())}.values())
    script = GUARD.format(here=str(Path(__file__).parent), pres=pres)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("done\n"), done.stdout[-200:] + done.stderr[-2000:]
