"""Greedy decoding on CUDA: a pass is sent before the one before was read, and its token never leaves the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakecuda import FakeCuda, Result

from helpers import TINY, edited, open_engine
from minfer import Sampling
from minfer.backends.gpu.devices import cuda
from minfer.engine.generate import Generation
from minfer.errors import DeviceError, NumericsError
from minfer.gguf.writer import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from minfer.engine.engine import Engine

PATH = TINY / "qwen3.gguf"
PROMPT = [1, 5, 9, 2, 7]


class Letters:
    """A tokenizer whose every token is a letter, and some end the text."""

    def __init__(self, n_vocab: int, eog_ids: frozenset[int] = frozenset()) -> None:
        self.n_vocab, self.eog_ids = n_vocab, eog_ids

    def token_bytes(self, id: int, *, special: bool) -> bytes:
        return bytes([97 + id % 26])


def generate(engine: Engine, prompt: list[int] = PROMPT, *, eog: frozenset[int] = frozenset(), **options: Any) -> Any:
    letters: Any = Letters(engine.arch.n_vocab, eog)
    given = {"n_predict": 12, "sampling": Sampling.greedy(), "stop": (), "reuse": False} | options
    return Generation(engine, letters, prompt, **given)


def one_by_one(n: int, n_ctx: int = 64) -> list[int]:
    """Greedy ids from logits that were read before the next step was sent."""
    engine, ids = open_engine(PATH, device="cuda", n_ctx=n_ctx), []
    logits = engine.prefill(PROMPT)
    for _ in range(n):
        ids.append(int(logits.argmax()))
        logits = engine.prefill([ids[-1]])
    engine.close()
    return ids


def test_ids_that_stay_on_the_device_are_those_that_pass_through_the_host(
    machine: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over borders of context buckets, with a prompt in batches, and for several of the best."""
    monkeypatch.setattr(cuda, "WHOLE_ROWS", 16)
    want = one_by_one(50)
    assert len(set(want)) > 3
    monkeypatch.setattr("minfer.engine.engine.N_BATCH", 2)
    for n_probs in (0, 5):
        engine = open_engine(PATH, device="cuda")
        running = generate(engine, n_predict=50, sampling=Sampling(temperature=0, n_probs=n_probs))
        running.read()
        assert [token.id for token in running.tokens] == want
        assert engine.cells.tokens == PROMPT + want[:-1]
        engine.close()


def test_a_pass_is_sent_before_the_last_one_is_read(machine: FakeCuda) -> None:
    engine = open_engine(PATH, device="cuda")
    for step in engine.greedy(PROMPT, n=3):  # kernels, first graphs
        step()
    passes = engine.greedy([3], n=3)
    launched = []
    for step in passes:
        launched.append((machine.calls.count("cuGraphLaunch"), machine.calls.count("cuEventQuery")))
        step()
    first, read = launched[0]
    assert launched == [(first, read), (first + 1, read + 1), (first + 1, read + 2)], "the last sends none"
    assert first >= 2
    assert machine.calls.count("cuMemcpyDtoDAsync") == 4, "tokens of all passes but the two that the host named"
    engine.close()


def test_what_was_sent_too_early_leaves_nothing(machine: FakeCuda) -> None:
    """An end of turn, a stop string, a caller that leaves, a full context: the next request starts as if alone."""
    ids = one_by_one(12)
    engine = open_engine(PATH, device="cuda")
    at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    ended = generate(engine, eog=frozenset({ids[at]}))
    ended.read()
    assert (ended.finish_reason, len(ended.tokens)) == ("stop", at + 1)
    assert engine.cells.tokens == PROMPT + ids[:at]
    text = generate(engine).read()
    stopped = generate(engine, stop=[text[3:6]])
    assert stopped.read() == text[:3] or text[3:6] in text[:5]
    assert stopped.finish_reason == "stop"
    assert engine.cells.tokens == PROMPT + ids[: len(stopped.tokens) - 1]
    left = generate(engine)
    next(left), next(left)
    left.close()
    assert engine.cells.tokens == PROMPT + ids[: len(left.tokens) - 1]
    again = generate(engine, [*PROMPT, *ids[:4]], reuse=True, n_predict=8)  # a session goes on where it was
    again.read()
    assert [token.id for token in again.tokens] == ids[4:12]
    assert again.usage.cached_tokens >= len(PROMPT)
    engine.close()


def test_a_full_context_ends_it(machine: FakeCuda) -> None:
    ids = one_by_one(6, n_ctx=len(PROMPT) + 6)
    engine = open_engine(PATH, device="cuda", n_ctx=len(PROMPT) + 4)
    running = generate(engine, n_predict=None)
    running.read()
    assert running.finish_reason == "context"
    assert [token.id for token in running.tokens] == ids[:5]
    assert engine.cells.free == 0
    engine.close()


def test_bad_values_are_named_though_the_next_pass_is_on_its_way(machine: FakeCuda, tmp_path: Path) -> None:
    def poison(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        values = np.ones((72, 40), np.float32)
        values[7, 3] = np.nan
        t["blk.1.ffn_up.weight"] = Tensor.of("blk.1.ffn_up.weight", values)

    engine = open_engine(edited(PATH, tmp_path / "nan.gguf", poison), device="cuda")
    with pytest.raises(NumericsError, match=r"blk\.1\.ffn_act \(Project on cuda"):
        generate(engine).read()
    assert len(engine.cells) == 0
    engine.close()


def test_a_fault_of_a_pass_sent_ahead_is_told_once_and_for_all(machine: FakeCuda) -> None:
    engine = open_engine(PATH, device="cuda")
    running = generate(engine)
    next(running)
    machine.fault = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS .*last launches were"):
        running.read()
    with pytest.raises(DeviceError, match="must be opened anew"):
        engine.prefill([1])
    engine.close()
