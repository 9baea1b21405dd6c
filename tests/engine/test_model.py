"""`load`, `Model`, `Generation` and `Session`, on a tiny model with a tokenizer of single characters."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import minfer
from helpers import TINY, edited
from minfer import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from minfer.gguf.writer import Tensor

GREEDY = Sampling.greedy()
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
#: 93 printable characters, space as byte-level BPE writes it, and three special tokens: 96, as the model has rows.
TOKENS = ["\u0120", "\u010a"] + [chr(c) for c in range(33, 124)] + SPECIAL


def _with_tokenizer(m: dict[str, Any], t: dict[str, Tensor]) -> None:
    m.update(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": np.array([1] * 93 + [3] * 3, np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": np.uint32(94),
            "tokenizer.ggml.bos_token_id": np.uint32(95),
            "tokenizer.ggml.add_bos_token": False,
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return edited(TINY / "qwen3.gguf", tmp_path / "tiny.gguf", _with_tokenizer)


@pytest.fixture
def model(path: Path) -> Any:
    with minfer.load(path, n_ctx=256, device="reference") as loaded:
        yield loaded


def _greedy_ids(model: minfer.Model, prompt: str, n: int) -> list[int]:
    """The greedy continuation, one whole prefill a token: no cache, no generation loop."""
    ids = model.tokenizer.encode(prompt)
    for _ in range(n):
        engine = model.engine
        engine.cells.truncate(0)
        ids.append(int(engine.prefill(ids).argmax()))
    engine.cells.truncate(0)
    return ids[len(model.tokenizer.encode(prompt)) :]


def test_greedy_generation_is_the_arg_max_a_token(model: minfer.Model) -> None:
    expected = _greedy_ids(model, "hello", 20)
    assert not set(expected) & {93, 94, 95}, "the recorded model speaks before it ends"
    generation = model.generate("hello", n_predict=20, sampling=GREEDY)
    pieces = list(generation)
    assert [token.id for token in generation.tokens] == expected
    assert "".join(pieces) == generation.text == model.tokenizer.decode(expected)
    assert generation.finish_reason == "length"
    assert generation.usage == minfer.Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=20)
    assert generation.timings.prefill_seconds > 0
    assert generation.timings.decode_rate > 0


def test_only_the_best_logits_leave_the_device_where_they_are_enough(model: minfer.Model) -> None:
    shapes = []
    value = model.engine._value
    model.engine._value = lambda plan, node, *keep: shapes.append(node.shape) or value(plan, node, *keep)
    model.generate("hello", n_predict=2, sampling=GREEDY).read()
    model.generate("hello", n_predict=2, sampling=minfer.Sampling(seed=1)).read()
    model.generate("hello", n_predict=2, sampling=minfer.Sampling(seed=1, top_k=0)).read()
    assert shapes == [(3, 1)] * 2 + [(81, 1)] * 2 + [(model.engine.arch.n_vocab, 1)] * 2


def test_text_and_token_ids_are_the_same_prompt(model: minfer.Model) -> None:
    ids = model.tokenizer.encode("hello")
    texts = [model.generate(prompt, n_predict=8, sampling=GREEDY).read() for prompt in ("hello", ids)]
    assert texts[0] == texts[1] != ""


def test_the_same_prompt_after_another_gives_the_same_text(model: minfer.Model) -> None:
    first = model.generate("abc", n_predict=12, sampling=GREEDY).read()
    again = model.generate("abc", n_predict=12, sampling=GREEDY)
    assert again.read() == first
    assert again.usage.cached_tokens == 0, "the same call does the same work"
    model.generate("something else", n_predict=3, sampling=GREEDY).read()
    assert model.generate("abc", n_predict=12, sampling=GREEDY).read() == first


def test_a_seed_gives_the_same_text_and_another_seed_another(model: minfer.Model) -> None:
    def text(seed: int) -> str:
        return model.generate("abc", n_predict=24, sampling=Sampling(temperature=1.5, top_k=0, seed=seed)).read()

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_n_predict_zero_runs_nothing(model: minfer.Model) -> None:
    generation = model.generate("abc", n_predict=0)
    assert generation.read() == ""
    assert generation.finish_reason == "length"
    assert model.engine.cache.built == 0


def test_the_context_ends_a_generation_and_says_so(path: Path) -> None:
    with minfer.load(path, n_ctx=16, device="reference") as model:
        generation = model.generate("hello", sampling=Sampling(temperature=0, logit_bias={94: -np.inf, 95: -np.inf}))
        generation.read()
        assert generation.finish_reason == "context"
        # 5 of the prompt, 11 generated and run, and one more sampled from the last row
        assert generation.usage.completion_tokens == 12
        with pytest.raises(minfer.ContextOverflowError, match="17 tokens do not fit: the context has 16 cells"):
            model.generate("x" * 17)


def test_an_end_token_ends_and_is_not_shown(model: minfer.Model) -> None:
    generation = model.generate("hello", n_predict=9, sampling=Sampling(temperature=0, logit_bias={94: 1e9}))
    assert generation.read() == ""
    assert generation.finish_reason == "stop"
    assert [token.id for token in generation.tokens] == [94]


def test_a_stop_string_ends_across_tokens(model: minfer.Model) -> None:
    text = model.generate("hello", n_predict=20, sampling=GREEDY).read()
    stop = text[5:8]
    generation = model.generate("hello", n_predict=20, sampling=GREEDY, stop=[stop])
    assert generation.read() == text[: text.index(stop)]
    assert generation.finish_reason == "stop"
    assert generation.usage.completion_tokens == text.index(stop) + 3


def test_a_new_request_ends_the_one_before(model: minfer.Model) -> None:
    first = model.generate("hello", n_predict=20, sampling=GREEDY)
    begun = next(first)
    model.generate("other", n_predict=2, sampling=GREEDY).read()
    assert list(first) == []
    assert first.text == begun


def test_what_generates_on_another_thread_is_left_alone(model: minfer.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    original = model.engine.submit

    def slow(*args: Any, **how: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return original(*args, **how)

    monkeypatch.setattr(model.engine, "submit", slow)
    first = model.generate("abc", n_predict=2, sampling=GREEDY)
    with ThreadPoolExecutor(1) as other:
        text = other.submit(first.read)
        assert inside.wait(60)
        for at_once in (model.close, first.close, first.read, lambda: model.generate("d")):
            with pytest.raises(minfer.RequestError, match="the model generates on another thread"):
                at_once()
        go_on.set()
        assert text.result() == first.text
    assert model.generate("abc", n_predict=2, sampling=GREEDY).read() == first.text


def test_a_session_keeps_its_messages_and_its_cache(model: minfer.Model) -> None:
    session = model.session("be brief")
    first = session.send("hi", n_predict=6, sampling=GREEDY)
    answer = first.read()
    assert first.usage.cached_tokens == 0
    assert session.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
    ]
    second = session.send("more", n_predict=6, sampling=GREEDY)
    second.read()
    prompt = model.template.render(session.messages[:-1])
    fresh = model.generate(model.tokenizer.encode(prompt, add_special=False), n_predict=6, sampling=GREEDY)
    assert fresh.read() == second.text, "reused rows give what a fresh prompt gives"
    assert second.usage.cached_tokens >= first.usage.prompt_tokens


def test_regenerate_and_clear(model: minfer.Model) -> None:
    session = model.session()
    with pytest.raises(minfer.RequestError, match="nothing was asked yet"):
        session.regenerate()
    answer = session.send("hi", n_predict=5, sampling=GREEDY).read()
    assert session.regenerate(n_predict=5, sampling=GREEDY).read() == answer
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    session.clear()
    assert session.messages == []


def test_an_answer_cut_short_stays_in_the_session(model: minfer.Model) -> None:
    session = model.session()
    generation = session.send("hi", n_predict=20, sampling=GREEDY)
    begun = next(generation) + next(generation)
    generation.close()
    assert session.messages[-1] == {"role": "assistant", "content": begun}
    assert list(generation) == []


def test_a_message_that_does_not_fit_is_taken_back(model: minfer.Model) -> None:
    session = model.session()
    with pytest.raises(minfer.ContextOverflowError):
        session.send("x" * 300)
    assert session.messages == []


def test_a_closed_model_refuses(path: Path) -> None:
    model = minfer.load(path, n_ctx=64, device="reference")
    generation = model.generate("hello", n_predict=20, sampling=GREEDY)
    next(generation)
    model.close()
    model.close()
    assert list(generation) == []
    for call in (lambda: model.generate("a"), lambda: model.plan(), lambda: model.n_ctx):
        with pytest.raises(minfer.RequestError, match="the model is closed"):
            call()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_ctx": 0}, minfer.RequestError, "n_ctx is 0; the model was trained for 1 to 32,768"),
        ({"n_ctx": 40_000}, minfer.RequestError, "n_ctx is 40,000"),
        ({"kv_format": "q4"}, minfer.RequestError, "unknown KV format 'q4'"),
        ({"device": "tpu"}, minfer.UnsupportedError, "no device named 'tpu'; expected auto or one of"),
        ({"threads": 0}, minfer.RequestError, "threads is 0"),
    ],
)
def test_arguments_out_of_range(path: Path, arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        minfer.load(path, **arguments)


def test_requests_out_of_range(model: minfer.Model) -> None:
    with pytest.raises(minfer.RequestError, match="the prompt is empty"):
        model.generate("")
    with pytest.raises(minfer.RequestError, match="n_predict is -2"):
        model.generate("a", n_predict=-2)
    with pytest.raises(minfer.RequestError, match="a step of 257 tokens"):
        model.plan(257)
    with pytest.raises(minfer.RequestError, match="a step of 1 tokens with 2 outputs"):
        model.plan(1, 2)


def test_the_plan_is_the_plan_that_runs(model: minfer.Model) -> None:
    model.generate("hello", n_predict=2, sampling=minfer.Sampling(top_k=0)).read()  # all logits, as in `plan`
    plan = model.plan()
    (ran,) = [entry.plan for params, entry in model.engine.cache._entries.items() if params.n_tokens == 1]
    assert ran.to_json()["nodes"] == plan.to_json()["nodes"]
    assert "blk.0.qkv" in str(plan)


def test_explain_names_device_memory_and_fusions(model: minfer.Model) -> None:
    text = model.explain()
    for part in ("qwen3, 3 layers", "3 layers on reference", "256 cells, f32", f"{model.engine.kv_bytes:,} bytes"):
        assert part in text


def test_threads_are_each_engine_s_own(path: Path) -> None:
    from minfer.backends.cpu import CpuBackend, default_threads

    with (
        minfer.load(path, device="cpu", n_ctx=32, threads=1) as one,
        minfer.load(path, device="cpu", n_ctx=32, threads=3) as three,
        minfer.load(path, device="cpu", n_ctx=32) as default,
    ):
        for model, threads in ((one, 1), (three, 3), (default, default_threads())):
            (backend,) = model.engine.backends.values()
            assert isinstance(backend, CpuBackend)
            assert backend.workspace.threads == threads
            assert model.generate("ab", n_predict=3, sampling=GREEDY).read()
