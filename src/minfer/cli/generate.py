"""`minfer run`, and what `chat` shares with it: loading, sampling flags, printing an answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import minfer
from minfer.backends.profile import launch_table
from minfer.cli.terminal import Download, Waiting, note, write
from minfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from minfer import Generation, Model, Sampling
    from minfer.backends.profile import Profile

PROMPT_LIMIT = 64 << 20  # bytes; more than any context holds


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or standard input; the last line's end is not part of it.

    Raises `RequestError` if it cannot be read, is not UTF-8, or is longer than 64 MiB.
    """
    if file is None and prompt is not None and prompt != "-":
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python passes on other bytes
            raise RequestError("the prompt is not UTF-8")
        return prompt
    where = "standard input" if file is None or str(file) == "-" else str(file)
    try:
        if file is None or str(file) == "-":
            data = sys.stdin.buffer.read(PROMPT_LIMIT + 1)
        else:
            with file.open("rb") as opened:
                data = opened.read(PROMPT_LIMIT + 1)
        if len(data) > PROMPT_LIMIT:
            raise RequestError(f"the prompt from {where} is longer than {PROMPT_LIMIT:,} bytes")
        return data.decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise RequestError(f"the prompt cannot be read from {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the prompt from {where} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from error


def load(
    model: str | None,
    *,
    n_ctx: int | None,
    device: str,
    threads: int | None,
    kv_format: str,
    explain: bool,
    gpu_layers: str | None = None,
) -> Model:
    """Fetch and load a model, saying on standard error what takes time."""
    from minfer import sources

    with Download() as progress:
        path = sources.resolve(model, progress=progress)
    with Download() as bar, Waiting(f"loading {path.name}") as waiting:

        def upload(done: int, total: int | None, what: str) -> None:
            waiting.done()
            bar(done, total, what)

        how: dict[str, Any] = {"n_ctx": n_ctx, "device": device, "threads": threads, "kv_format": kv_format}
        if gpu_layers is not None:
            how["gpu_layers"] = int(gpu_layers) if gpu_layers.isdecimal() else gpu_layers
        loaded = minfer.load(path, **how, progress=upload)
    if explain:
        note(loaded.explain())
    elif device == "auto":
        note(f"device: {loaded.device}")
    return loaded


def make_sampling(fields: Mapping[str, Any]) -> Sampling:
    """Raises `RequestError` for a value out of range."""
    return minfer.Sampling(**fields)


def answer(
    model: Model,
    prompt: str,
    *,
    raw: bool,
    system: str | None,
    n_predict: int | None,
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    stats: bool,
) -> None:
    """Generate and print one answer; it ends with a line end, as text in a terminal or file does."""
    chosen = make_sampling(sampling)
    if raw:
        generation = model.generate(prompt, n_predict=n_predict, sampling=chosen, stop=stop)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        generation = model.chat(messages, n_predict=n_predict, sampling=chosen, stop=stop)
    try:
        stream(generation)
    finally:
        if generation.text and not generation.text.endswith("\n"):
            write("\n")
    report(generation, model.n_ctx, stats=stats)


def stream(generation: Generation, ended: Callable[[], bool] = lambda: False) -> None:
    """Print the pieces as they come, until `ended()` says that the user has had enough."""
    with Waiting(f"reading {generation.usage.prompt_tokens:,} tokens") as waiting:
        for piece in generation:
            waiting.done()
            write(piece)
            if ended():
                break


def report(generation: Generation, n_ctx: int, *, stats: bool) -> None:
    """What is to be said after an answer: that the context ended it, and the numbers if they are wanted."""
    if generation.finish_reason == "context":
        note(f"the context of {n_ctx:,} tokens is full, the answer ends here; --n-ctx sets its size")
    if stats:
        usage, timings = generation.usage, generation.timings
        cached = f", {usage.cached_tokens:,} of them cached" if usage.cached_tokens else ""
        note(
            f"prompt {usage.prompt_tokens:,} tokens{cached}, {timings.prefill_seconds:.2f} s "
            f"({timings.prefill_rate:.1f} tokens/s); answer {usage.completion_tokens:,} tokens, "
            f"{timings.decode_seconds:.2f} s ({timings.decode_rate:.1f} tokens/s)"
        )


def profile(model: Model, measured: Profile) -> str:
    """Where host time went, and how long the launches of the last step take by the device's own clock."""
    parts = [measured.table()]
    for device, times in model.engine.launch_times().items():
        if isinstance(times, str):
            parts.append(f"launches on {device} are not timed: {times}")
        else:
            parts.append(f"launches of the last step, by the clock of {device}:\n{launch_table(times)}")
    return "\n\n".join(parts)
