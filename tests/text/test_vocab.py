"""Metadata that lies is refused by name; what is merely odd is accepted."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from vocab_data import PREFIX, tiny_bpe, tiny_spm

from minfer.errors import ModelFileError, RequestError, UnsupportedError
from minfer.text import MissingPreTokenizerWarning, Tokenizer

BPE = tiny_bpe(["a b", "ab c"], control=["<|im_end|>"])
SPM = tiny_spm({"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -4.0})
N_BPE, N_SPM = len(BPE[PREFIX + "tokens"]), len(SPM[PREFIX + "tokens"])


def change(base: dict, **changes) -> dict:
    """`base` with keys under tokenizer.ggml. replaced; None takes a key away."""
    made = {**base, **{PREFIX + key: value for key, value in changes.items()}}
    return {key: value for key, value in made.items() if value is not None}


LIES = [
    (BPE, {"model": None}, "model is missing"),
    (BPE, {"model": 7}, "model: found int"),
    (BPE, {"tokens": None}, "tokens is missing"),
    (BPE, {"tokens": []}, "tokens is empty"),
    (BPE, {"tokens": b"abc"}, "tokens: found bytes"),
    (BPE, {"tokens": np.arange(N_BPE)}, "tokens: found an array of int64"),
    (BPE, {"tokens": [1] * N_BPE}, "tokens: found elements of type int"),
    (BPE, {"tokens": [*BPE[PREFIX + "tokens"][:-1], "ab"]}, "holds 'ab' twice, as ids 256 and 258"),
    (BPE, {"token_type": [1] * (N_BPE - 1)}, f"token_type has {N_BPE - 1} entries for {N_BPE} tokens"),
    (BPE, {"token_type": [1] * (N_BPE + 1)}, f"token_type has {N_BPE + 1} entries for {N_BPE} tokens"),
    (BPE, {"token_type": np.ones(N_BPE, np.float32)}, "token_type: found an array of float32"),
    (BPE, {"token_type": ["1"] * N_BPE}, "token_type: found an array of <U1"),
    (BPE, {"token_type": 1}, "token_type: found int"),
    (BPE, {"token_type": [1] * (N_BPE - 1) + [9]}, f"token_type[{N_BPE - 1}] is 9"),
    (BPE, {"token_type": [-1] + [1] * (N_BPE - 1)}, "token_type[0] is -1"),
    (BPE, {"token_type": [6] + [1] * (N_BPE - 1)}, "tokens[0] is typed as a byte but is b'"),
    (BPE, {"merges": None}, "merges is missing"),
    (BPE, {"merges": [1, 2]}, "merges: found elements of type int"),
    (BPE, {"bos_token_id": N_BPE}, f"bos_token_id is {N_BPE}, outside the vocabulary's ids 0 to {N_BPE - 1}"),
    (BPE, {"eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295"),
    (BPE, {"eot_token_id": -1}, "eot_token_id is -1"),
    (BPE, {"eos_token_id": "2"}, "eos_token_id: found str"),
    (BPE, {"eos_token_id": True}, "eos_token_id: found bool"),
    (BPE, {"add_bos_token": True}, "add_bos_token is true but tokenizer.ggml.bos_token_id is missing"),
    (BPE, {"add_eos_token": 1}, "add_eos_token: found int"),
    (BPE, {"pre": 3}, "pre: found int"),
    (SPM, {"scores": None}, "scores is missing"),
    (SPM, {"scores": [0.0] * (N_SPM - 1)}, f"scores has {N_SPM - 1} entries for {N_SPM} tokens"),
    (SPM, {"scores": ["0"] * N_SPM}, "scores: found an array of <U1"),
    (SPM, {"scores": [0.0] * (N_SPM - 1) + [float("nan")]}, f"scores[{N_SPM - 1}] is not a number"),
    (SPM, {"add_space_prefix": "yes"}, "add_space_prefix: found str"),
]


@pytest.mark.parametrize(("base", "changes", "message"), LIES, ids=[message[:40] for _, _, message in LIES])
def test_lies_are_refused_by_name(base, changes, message):
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_metadata(change(base, **changes))
    assert message in str(caught.value)


MERGE_LIES = [
    (["a b", "abc"], "merges[1] is b'abc'"),
    (["a b", "ab  c"], "merges[1] is b'ab  c'"),
    (["ab", "a b c"], "merges[0] is b'ab'"),
    ([" ab"], "merges[0] is b' ab'"),
    (["ab "], "merges[0] is b'ab '"),
    ([b"a \xff"], "merges is not UTF-8"),
    (["a c"], "merges[0] is 'a c', but 'ac' is not a token"),
    (["xyz b"], "merges[0] is 'xyz b', but 'xyz' is not a token"),
]


@pytest.mark.parametrize(("merges", "message"), MERGE_LIES, ids=[message for _, message in MERGE_LIES])
def test_merges_are_refused_by_name_at_the_first_text(merges, message):
    tok = Tokenizer.from_metadata(change(BPE, merges=merges))
    assert tok.decode([257]) == "abc"  # ids need no merges
    for _ in range(2):  # and not only once
        with pytest.raises(ModelFileError) as caught:
            tok.encode("x")
        assert message in str(caught.value)


def test_unknown_rules_are_refused_not_guessed():
    with pytest.raises(UnsupportedError, match=r"'klingon'; minfer knows .*smollm"):
        Tokenizer.from_metadata(change(BPE, pre="klingon"))
    with pytest.raises(UnsupportedError, match="'bert'; minfer reads 'gpt2'"):
        Tokenizer.from_metadata(change(BPE, model="bert"))


def test_missing_pre_tokenizer_warns_and_names_what_is_assumed():
    with pytest.warns(MissingPreTokenizerWarning, match="'default' is assumed") as caught:
        Tokenizer.from_metadata(change(BPE, pre=None))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokenizer.from_metadata(SPM)  # only byte-level BPE has one


def test_padded_embedding_rows_are_accepted_missing_ones_refused():
    for base, n in ((BPE, N_BPE), (SPM, N_SPM)):
        assert Tokenizer.from_metadata(base, n_embd_rows=n + 64).n_vocab == n
        with pytest.raises(ModelFileError, match=rf"{n} tokens but the embedding has {n - 1} rows"):
            Tokenizer.from_metadata(base, n_embd_rows=n - 1)


def test_odd_but_honest_vocabularies():
    tokens = [t.encode() for t in BPE[PREFIX + "tokens"]]
    tokens += [b"", b"", b"\xff\xfe", b"nul\0nul"]
    odd = change(BPE, tokens=tokens, token_type=[*BPE[PREFIX + "token_type"], 1, 1, 1, 4])
    tok = Tokenizer.from_metadata(odd)
    assert tok.encode("abc") == [257]
    assert tok.token_bytes(N_BPE) == b""
    assert tok.token_bytes(N_BPE + 2) == b"\xff\xfe"
    assert tok.encode("abcnul\0nul") == [257, N_BPE + 3]
    assert Tokenizer.from_metadata(change(BPE, token_type=None)).encode("abc") == [257]


def test_turn_ends_by_name_need_not_be_typed():
    """A converter that types <|im_end|> as normal text does not make the answer endless; </s> as text stays text."""
    base = tiny_bpe([], user=["<|im_end|>", "</s>", "<|end|>"])
    types = base[PREFIX + "token_type"]
    types[-3:] = [1, 1, 1]
    tok = Tokenizer.from_metadata(base)
    assert tok.eog_ids == {256, 258}
    assert tok.is_special(256)
    assert not tok.is_special(257)
    assert tok.encode("<|im_end|>") == [256]
    assert tok.token_bytes(257) == b"</s>"
    harmony = Tokenizer.from_metadata(tiny_bpe([], control=["<|end|>", "<|return|>", "<|call|>"]))
    assert harmony.eog_ids == {257, 258}


def test_ids_outside_the_vocabulary():
    tok = Tokenizer.from_metadata(BPE)
    for call in (tok.token_bytes, tok.piece, tok.is_special):
        for id in (-1, N_BPE):
            with pytest.raises(RequestError, match=f"token id {id} is outside the vocabulary's ids 0 to {N_BPE - 1}"):
                call(id)
    with pytest.raises(RequestError, match="must be a str, found bytes"):
        tok.encode(b"abc")
