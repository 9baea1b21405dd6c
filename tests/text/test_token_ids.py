"""Token ids against llama.cpp's, for every vocabulary in tests/data/vocabs."""

from __future__ import annotations

import pytest
from vocab_data import GEMMA, NAMES, SMOLLM, cases, tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_llama_cpp(name):
    strings, expected = cases()["strings"], cases()["ids"][name]
    assert len(strings) == len(expected) == 46
    tok = tokenizer(name)
    assert [tok.encode(text, add_special=False) for text in strings] == expected


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_text_back(name):
    tok = tokenizer(name)
    prefix = " " if name in ("llama-spm", "phi-3") else ""
    for text in cases()["strings"]:
        assert tok.decode(tok.encode(text, add_special=False)) == (prefix + text if text else "")


@pytest.mark.parametrize("name", [SMOLLM, GEMMA])
def test_ids_of_the_real_models_equal_llama_cpp(name):
    tok = tokenizer(name)
    expected = cases()["reference"][name]["cases"]
    assert len(expected) == 42
    for text, ids in expected:
        assert tok.encode(text) == ids, text


@pytest.mark.parametrize("name", [SMOLLM, GEMMA])
def test_generated_text_equals_llama_cpp(name):
    tok = tokenizer(name)
    for ids, text in cases()["reference"][name]["decoded"]:
        assert tok.decode(ids, special=True) == text


@pytest.mark.parametrize(
    ("name", "bos", "eos", "eog"),
    [
        ("deepseek-llm", 100000, 100001, {"<｜end▁of▁sentence｜>"}),
        ("gpt-2", 50256, 50256, {"<|endoftext|>"}),
        ("llama-bpe", 128000, 128001, {"<|end_of_text|>", "<|eot_id|>"}),
        ("llama-spm", 1, 2, {"</s>"}),
        ("phi-3", 1, 32000, {"<|endoftext|>", "<|end|>"}),
        ("qwen2", 151643, 151643, {"<|endoftext|>", "<|im_end|>"}),
        ("starcoder", 0, 0, {"<|endoftext|>", "<fim_pad>"}),
        (SMOLLM, 1, 2, {"<|im_end|>", "<|endoftext|>", "<reponame>"}),
        (GEMMA, 2, 1, {"<eos>", "<end_of_turn>"}),
    ],
)
def test_roles(name, bos, eos, eog):
    tok = tokenizer(name)
    assert (tok.bos_id, tok.eos_id) == (bos, eos)
    assert {tok.piece(id).decode() for id in tok.eog_ids} == eog
