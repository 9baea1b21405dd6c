"""The Metal device over the fake, direct and replayed, gives the simulator's bits; and how many messages that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakemetal import Runtime, installed

from helpers import TINY, TINY_MODELS, open_engine
from minfer import Sampling, cases
from minfer.engine.generate import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minfer.engine.engine import Engine

PROMPT = [1, 5, 9, 2, 7]


def follow(engine: Engine, prompt: Sequence[int], n: int) -> list[bytes]:
    """Greedy decoding: the logits of each step, as bytes."""
    logits, out = engine.prefill(prompt), []
    for _ in range(n):
        out.append(logits.tobytes())
        logits = engine.prefill([int(np.argmax(logits))])
    engine.close()
    return out


def run(path: Path, device: str, n: int, **options: object) -> list[bytes]:
    return follow(open_engine(path, device=device, **options), PROMPT, n)


@pytest.mark.parametrize("replay", ["0", "1"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_give_the_simulators_bits(
    name: str, replay: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINFER_METAL_REPLAY", replay)
    want = run(TINY / f"{name}.gguf", "simulator", 6)
    assert run(TINY / f"{name}.gguf", "metal", 6) == want
    replayed = mac.messages["executeCommandsInBuffer:withRange:"]
    assert replayed > 3 if replay == "1" else not replayed


def test_300_tokens_with_growing_context(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    path = TINY / "llama-linear.gguf"
    want = run(path, "simulator", 300, n_ctx=320)
    for replay in ("0", "1"):
        monkeypatch.setenv("MINFER_METAL_REPLAY", replay)
        assert run(path, "metal", 300, n_ctx=320) == want


def test_a_prompt_of_several_batches(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch's inputs are written only when the first, whose logits nobody reads, is done."""
    monkeypatch.setattr("minfer.engine.engine.N_BATCH", 8)
    prompt = [1 + i % 7 for i in range(29)]
    logits = []
    for device in ("metal", "simulator"):
        engine = open_engine(TINY / "qwen3.gguf", device=device)
        logits.append(engine.prefill(prompt).tobytes())
        engine.close()
    assert logits[0] == logits[1]


def test_two_engines_with_different_kv_formats(mac: Runtime) -> None:
    path, formats = TINY / "llama-llama3rope.gguf", ("f32", "q8_0")
    want = {f: run(path, "simulator", 5, kv_format=f) for f in formats}
    engines = {f: open_engine(path, device="metal", kv_format=f) for f in formats}
    logits = {f: engine.prefill(PROMPT) for f, engine in engines.items()}
    got: dict[str, list[bytes]] = {f: [] for f in formats}
    for _ in range(5):
        for f, engine in engines.items():
            got[f].append(logits[f].tobytes())
            logits[f] = engine.prefill([int(np.argmax(logits[f]))])
    for engine in engines.values():
        engine.close()
    assert got == want
    assert got["f32"] != got["q8_0"]


@pytest.mark.parametrize("replay", ["0", "1"])
def test_windows_of_one_part_and_of_two_agree(replay: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows are read in one part, 257 in two and combined: other launches of one graph, one result."""
    monkeypatch.setenv("MINFER_METAL_REPLAY", replay)
    prompt = [1 + i % 11 for i in range(253)]
    logits = {}
    for tiers in ("split:off", ""):
        monkeypatch.setenv("MINFER_KERNELS", tiers)
        engine = open_engine(TINY / "llama-linear.gguf", device="metal", n_ctx=300)
        rows = follow(engine, prompt, 8)
        want = open_engine(TINY / "llama-linear.gguf", device="simulator", n_ctx=300)
        assert rows == follow(want, prompt, 8)
        logits[tiers] = [np.frombuffer(row, np.float32) for row in rows]
    for n, (one, two) in enumerate(zip(*logits.values(), strict=True), len(prompt)):
        assert np.array_equal(one, two) == (n <= 256), f"{n} rows"
        assert cases.error(two, one) <= cases.BOUNDS["attention"]


class Letters:
    """A tokenizer whose every token is a letter."""

    eog_ids: frozenset[int] = frozenset()

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def token_bytes(self, id: int, *, special: bool) -> bytes:
        return bytes([97 + id % 26])


def generation(engine: Engine, n: int) -> Generation:
    letters: Any = Letters(engine.arch.n_vocab)
    greedy = Sampling.greedy()
    return Generation(engine, letters, PROMPT, n_predict=n, sampling=greedy, stop=(), reuse=False)


def test_the_next_step_is_sent_before_a_token_goes_out(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait, sample, write inputs, submit, and only then the token: the GPU has work while the text is used."""
    monkeypatch.setenv("MINFER_METAL_REPLAY", "0")
    engine = open_engine(TINY / "qwen3.gguf", device="metal")
    running = generation(engine, 4)
    seen = [(mac.committed, len(mac.in_flight)) for _ in running]
    assert seen == [(2, 1), (3, 1), (4, 1), (4, 0)], "the prompt and a step; then a step a token; none after the last"
    plain = open_engine(TINY / "qwen3.gguf", device="simulator")
    assert not plain.runs_ahead
    assert generation(plain, 4).read() == running.text
    for each in (engine, plain):
        each.close()


def test_a_step_that_nobody_waits_for_leaves_nothing_behind(mac: Runtime) -> None:
    """A generation that is closed after a token has a step on its way, whose token never counts."""
    engine = open_engine(TINY / "qwen3.gguf", device="metal")
    want = generation(engine, 6).read()
    for _ in range(3):
        cut = generation(engine, 6)
        next(cut)
        cut.close()
        assert len(engine.cells) == len(PROMPT)
    assert generation(engine, 6).read() == want
    engine.close()


def test_rows_move_on_the_gpu(mac: Runtime) -> None:
    engine = open_engine(TINY / "qwen2.gguf", device="metal")
    engine.prefill(PROMPT)
    backend = engine.backends["metal"]
    region = backend.regions[0]
    size = region.row_bytes
    before = backend.read(region.k, 5 * size)
    backend.copy_rows([(0, 2, 3)])  # overlaps itself
    after = backend.read(region.k, 5 * size)
    assert after[2 * size :].tobytes() == before[: 3 * size].tobytes()
    assert before[: 3 * size].any()
    engine.close()


# --- messages ----------------------------------------------------------------------------------------------------


def _steps(engine: Engine, n: int, mac: Runtime) -> list[int]:
    counts = []
    for token in range(1, n + 1):
        mac.messages.clear()
        engine.prefill([token])
        counts.append(mac.sent())
    return counts


def _launches(engine: Engine, n_tokens: int) -> int:
    plan = engine.plan(n_tokens)
    return sum(len(engine.backends["metal"].lower(plan, split)[1]) for split in plan.splits)


def test_messages_of_direct_encoding(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_METAL_REPLAY", "0")
    engine = open_engine(TINY / "gemma3.gguf", device="metal")
    counts = _steps(engine, 6, mac)
    launches = _launches(engine, 1)
    assert launches > 20
    assert counts[-1] == counts[-2]
    assert counts[-1] <= 4 * launches + 14, "recorded: pipeline, buffers, barrier, dispatch"
    assert mac.messages["commandBuffer"] == mac.messages["commit"] == 1
    device = engine.backends["metal"].device
    steps = engine.cache.get(engine.params(12)).programs[0].steps
    for _ in range(2):  # the first makes pipelines
        mac.messages.clear()
        device.encode(steps)
        device.synchronize()
    assert mac.sent() <= 5 * len(steps) + 14, "encoded once: arguments too"
    engine.close()


def test_messages_of_a_replayed_step(mac: Runtime) -> None:
    engine = open_engine(TINY / "gemma3.gguf", device="metal")
    assert _steps(engine, 6, mac)[-2:] == [14, 14], "a change here is a change of a decode step's cost"
    engine.close()


def test_messages_of_a_replayed_step_on_an_m1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pipeline is bound before, with an empty dispatch: two messages for each."""
    monkeypatch.setenv("MINFER_METAL_REPLAY", "1")
    with installed(Runtime(family=1007)) as mac:
        engine = open_engine(TINY / "gemma3.gguf", device="metal")
        counts = _steps(engine, 5, mac)
        bound = mac.messages["setComputePipelineState:"]
        assert bound == mac.messages["dispatchThreadgroups:threadsPerThreadgroup:"]
        plan = engine.plan(1)
        launches = engine.backends["metal"].lower(plan, plan.splits[0])[1]
        assert bound == len({(launch.family, launch.kernel, launch.constants) for launch in launches})
        assert counts[-1] == 14 + 2 * bound
        engine.close()
        del engine


def test_inputs_are_written_without_a_message(mac: Runtime) -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="metal")
    engine.prefill(PROMPT)
    device = engine.backends["metal"].device
    buffer = device.buffer(64, "input")
    mac.messages.clear()
    device.write(buffer, 0, bytes(64))
    assert device.read(buffer, 0, 64) == bytes(64)
    assert mac.sent() == 0
    engine.close()


def test_weights_stay_in_the_file(mac: Runtime) -> None:
    """What Metal allocates is less than the model's file by far: its weights are mapped."""
    path = TINY / "llama-linear.gguf"
    engine = open_engine(path, device="metal", n_ctx=8)
    engine.prefill([1])
    assert mac.messages["newBufferWithBytesNoCopy:length:options:deallocator:"] == 1
    wrapped = [i.software for i in mac.alive if i.owner == "MTLBuffer" and not i.counted]
    assert wrapped[0].length >= sum(engine.file.data(name).nbytes for name in engine.file.tensors)
    engine.close()
