"""The generation loop: prefill, then sample and decode until something ends it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from minfer.engine.sampler import Best, Sampler, Sampling
from minfer.engine.stop import StopStrings
from minfer.errors import RequestError
from minfer.text import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from minfer.engine.engine import Engine, Pass
    from minfer.engine.sampler import Token
    from minfer.text import Tokenizer

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, those of them found in the KV cache, and tokens generated."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in the prompt and in generation, and tokens a second of each (0.0 where nothing ran)."""

    prefill_seconds: float
    decode_seconds: float
    prefill_rate: float
    decode_rate: float


class Generation(Iterator[str]):
    """Text as it is generated: an iterator of pieces, never half a character.

    `finish_reason` is None until the end, then "stop" (end of turn or a stop string), "length" (`n_predict` reached) or
    "context" (the context is full). `text` is what was given so far, `tokens` every sampled token with its
    log-probability. Closing it early is fine; the next request on the same model closes it too.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        n_predict: int | None,
        sampling: Sampling,
        stop: Sequence[str],
        reuse: bool,
        on_end: Callable[[Generation], None] | None = None,
    ) -> None:
        if n_predict is not None and n_predict < 0:
            raise RequestError(f"n_predict is {n_predict}, expected None or a number of tokens from 0")
        self.text = ""
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._n_predict = n_predict
        self._sampler = Sampler(sampling, engine.arch.n_vocab, suppressed=range(tokenizer.n_vocab, engine.arch.n_vocab))
        self._stops = StopStrings(stop)
        self._on_end = on_end
        self._prefill_seconds = self._decode_seconds = 0.0
        self._n_decoded = 0
        kept = min(engine.cells.common_prefix(self._prompt), len(self._prompt) - 1) if reuse else 0
        self._cached = max(kept, 0)
        engine.cells.truncate(self._cached)
        engine.cells.require(len(self._prompt) - self._cached)
        self._pieces = self._run()

    def __next__(self) -> str:
        self._require_this_thread()
        piece = next(self._pieces)
        self.text += piece
        return piece

    def read(self) -> str:
        """Run to the end; the whole text."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """End here; what was generated stays in `text`."""
        self._require_this_thread()
        self._pieces.close()
        self._end()

    def _require_this_thread(self) -> None:
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING:
            raise RequestError(
                "the model generates on another thread: end that generation there, or load one model for each thread"
            )

    @property
    def usage(self) -> Usage:
        return Usage(len(self._prompt), self._cached, len(self.tokens))

    @property
    def timings(self) -> Timings:
        def rate(n: int, seconds: float) -> float:
            return n / seconds if seconds else 0.0

        prompt = len(self._prompt) - self._cached
        return Timings(
            self._prefill_seconds,
            self._decode_seconds,
            rate(prompt, self._prefill_seconds),
            rate(self._n_decoded, self._decode_seconds),
        )

    def _run(self) -> Generator[str, None, None]:
        engine, decoder = self._engine, StreamDecoder(self._tokenizer)
        if self._n_predict == 0:
            self.finish_reason = "length"
            self._end()
            return
        passes = self._passes()
        start = time.perf_counter()
        scores = next(passes)()
        self._prefill_seconds = time.perf_counter() - start
        history = list(self._prompt)
        while True:
            sampler = self._sampler
            token = sampler.choose(scores) if isinstance(scores, Best) else sampler.sample(scores, history)
            self.tokens.append(token)
            if token.id in self._tokenizer.eog_ids:
                self.finish_reason = "stop"
                break
            history.append(token.id)
            text = self._stops.push(decoder.push(token.id))
            end = self._ended()
            # A device that runs by itself has its next step before the text goes out.
            start = time.perf_counter()
            step = next(passes) if end is None and engine.runs_ahead else None
            self._decode_seconds += time.perf_counter() - start
            if text:
                yield text
            if end is not None:
                self.finish_reason = end
                break
            start = time.perf_counter()
            scores = (step or next(passes))()
            self._decode_seconds += time.perf_counter() - start
            self._n_decoded += 1
        if self._stops.found is None and (text := self._stops.push(decoder.finish()) + self._stops.finish()):
            yield text
        self._end()

    def _ended(self) -> FinishReason | None:
        """Why the token that was sampled last is the last."""
        if self._stops.found is not None:
            return "stop"
        if len(self.tokens) == self._n_predict:
            return "length"
        return None if self._engine.cells.free else "context"

    def _passes(self) -> Iterator[Pass]:
        """The pass of the prompt, then one for each token that joined `tokens`, called before the next is asked for:
        of the best of the logits where they are all that sampling takes, else of every one."""
        engine, prompt, k = self._engine, self._prompt[self._cached :], self._sampler.n_best
        if k is not None and not engine.ranks(k):
            k = None
        if k is not None and self._sampler.sampling.temperature == 0:
            yield from engine.greedy(prompt, k, self._n_predict)
            return
        yield engine.submit(prompt, k, keep=False)
        while True:
            yield engine.submit([self.tokens[-1].id], k, keep=False)

    def _end(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self)
