"""The commands over the true engine, on a tiny model; what they print is what the library gives."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import minfer
from minfer.backends import AUTO, open_backend
from minfer.cli import main
from minfer.errors import UnsupportedError
from minfer.gguf import Tensor, open_model, typed, write_model

TINY = Path(__file__).parents[1] / "data" / "tiny" / "qwen3.gguf"
#: 93 printable characters, the space and line end as byte-level BPE writes them, and ChatML's special tokens.
TOKENS = ["\u0120", "\u010a", *map(chr, range(33, 124)), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def automatic() -> str:
    """The device that `auto` is here: the first of its list that opens."""
    for name in AUTO:
        try:
            open_backend(name, "f32").close()
        except UnsupportedError:
            continue
        return name
    raise AssertionError(AUTO)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The recorded tiny model, with a tokenizer of single characters."""
    with open_model(TINY) as file:
        metadata = {key: typed(value, file.value_types[key]) for key, value in file.metadata.items()}
        tensors = [Tensor(t.name, t.format, t.shape, file.data(t.name).copy()) for t in file.tensors.values()]
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array([1] * 93 + [3] * 3, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": np.uint32(94),
        "tokenizer.ggml.add_bos_token": False,
    }
    write_model(tmp_path / "tiny.gguf", metadata, tensors)
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "tiny.gguf")


@pytest.fixture
def shell(monkeypatch, capsys):
    def run(*words, input=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        with pytest.raises(SystemExit) as end:
            main(list(words))
        return end.value.code, *capsys.readouterr()

    return run


def test_run(shell, model):
    how = {"n_predict": 8, "sampling": minfer.Sampling(temperature=0.7, seed=3)}
    flags = ["-m", model, "-n", "8", "--temp", "0.7", "--seed", "3"]
    with minfer.load(model) as loaded:
        raw = loaded.generate("Hello", **how).read()
        answer = loaded.chat([{"role": "user", "content": "Hello"}], **how).read()
    assert shell("run", *flags, "--raw", "Hello") == (0, raw.removesuffix("\n") + "\n", f"device: {automatic()}\n")
    code, out, err = shell("run", *flags, "--stats", "Hello")
    assert (code, out) == (0, answer.removesuffix("\n") + "\n")
    assert "answer 8 tokens" in err


def test_stop_and_the_end_of_the_context(shell, model):
    full = shell("run", "-m", model, "--raw", "--greedy", "--n-ctx", "32", "Hello")
    assert full[0] == 0
    assert "the context of 32 tokens is full, the answer ends here" in full[2]
    stop = full[1][5:7]
    cut = shell("run", "-m", model, "--raw", "--greedy", "--n-ctx", "32", "--stop", stop, "Hello")
    assert cut[1].rstrip("\n") == full[1][: full[1].index(stop)].rstrip("\n")
    code, out, err = shell("run", "-m", model, "--raw", "--n-ctx", "4", "Hello")
    assert (code, out) == (1, "")
    assert "error: 5 tokens do not fit: the context has 4 cells" in err


def test_plan(shell, model):
    with minfer.load(model) as loaded:
        assert shell("plan", "-m", model, "--n-tokens", "3")[1] == f"{loaded.plan(3)}\n"
        assert json.loads(shell("plan", "-m", model, "--json")[1]) == json.loads(json.dumps(loaded.plan().to_json()))
    assert shell("plan", "-m", model, "--n-tokens", "0")[0] == 1


def test_chat(shell, model):
    with minfer.load(model) as loaded:
        session = loaded.session("Be brief.")
        expected = [session.send(text, n_predict=6, sampling=minfer.Sampling.greedy()).read() for text in ("a", "b")]
    code, out, err = shell("chat", "-m", model, "--system", "Be brief.", "--greedy", "-n", "6", input=b"a\nb\n/quit\n")
    assert (code, err) == (0, f"device: {automatic()}\n")
    assert out == "".join(text.removesuffix("\n") + "\n" for text in expected)


def test_inspect(shell, model):
    code, out, _ = shell("inspect", model)
    assert code == 0
    assert "runs it" in out
    data = json.loads(shell("inspect", "--json", model)[1])
    assert data["metadata"]["tokenizer.ggml.tokens"]["value"] == TOKENS
    assert data["runs"]["devices"]["reference"] is None
    assert data["runs"]["memory"]["weights"] == sum(t["bytes"] for t in data["tensors"].values())
