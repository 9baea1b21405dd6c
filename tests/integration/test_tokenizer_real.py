"""The tokenizers of the two real models, from their files, against llama.cpp's ids."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from minfer import gguf
from minfer.errors import TemplateError
from minfer.text import ChatTemplate, StreamDecoder, Tokenizer

CASES = Path(__file__).parent.parent / "data" / "vocabs" / "cases.json.xz"
REFERENCE = json.loads(lzma.decompress(CASES.read_bytes()))["reference"]


def check(tokenizer: Tokenizer, name: str) -> None:
    for text, ids in REFERENCE[name]["cases"]:
        assert tokenizer.encode(text) == ids, text
    for ids, text in REFERENCE[name]["decoded"]:
        stream = StreamDecoder(tokenizer, special=True)
        assert "".join([stream.push(id) for id in ids]) + stream.finish() == text


def test_smollm(smollm_path):
    with gguf.open_model(smollm_path) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata, n_embd_rows=49152)
        template = ChatTemplate.from_metadata(model.metadata, tokenizer)
    check(tokenizer, "SmolLM2-135M-Instruct.Q4_1")
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_gemma(gemma_path):
    with gguf.open_model(gemma_path) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata, n_embd_rows=262144)
        with pytest.raises(TemplateError, match="use --raw"):
            ChatTemplate.from_metadata(model.metadata, tokenizer)  # the base model: no template
    check(tokenizer, "gemma-3-270m-q4_k_m")
