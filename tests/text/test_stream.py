"""The stream decoder: pieces joined equal the whole decode, and no piece holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_data import SMOLLM, tiny_bpe, tiny_spm, tokenizer

from minfer.errors import RequestError
from minfer.text import StreamDecoder, Tokenizer

BYTES = Tokenizer.from_metadata(tiny_bpe([], control=["<s>"]))
SPM = Tokenizer.from_metadata(tiny_spm({"▁": -1.0}, add_space_prefix=False, add_bos_token=False))


@given(st.lists(st.integers(0, 256), max_size=40), st.booleans())
def test_any_ids_stream_as_they_decode(ids, special):
    stream = StreamDecoder(BYTES, special=special)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.finish() == BYTES.decode(ids, special=special)
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 49151), max_size=30))
def test_real_tokens_stream_as_they_decode(ids):
    tok = tokenizer(SMOLLM)
    stream = StreamDecoder(tok)
    assert "".join([stream.push(id) for id in ids]) + stream.finish() == tok.decode(ids)


@given(st.text(max_size=30), st.sampled_from([BYTES, SPM]))
def test_valid_text_never_shows_a_replacement_character(text, tok):
    text = text.replace("\ufffd", "")
    stream = StreamDecoder(tok)
    pieces = [stream.push(id) for id in tok.encode(text)]
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_by_hand():
    stream = StreamDecoder(SPM)
    euro = [3 + byte for byte in "€".encode()]
    assert [stream.push(id) for id in [259, *euro]] == [" ", "", "", "€"]
    assert [stream.push(euro[0]), stream.push(euro[1]), stream.push(259)] == ["", "", "\ufffd "]
    assert [stream.push(euro[0]), stream.push(euro[1]), stream.finish()] == ["", "", "\ufffd"]
    assert stream.push(259) == " "
    assert stream.push(2) == ""  # </s>
    with pytest.raises(RequestError, match="token id 260"):
        stream.push(260)
