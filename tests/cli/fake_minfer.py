"""`python fake_minfer.py ARGUMENTS`: the minfer command with a model that answers by rule instead of by weights.

FAKE_ANSWER is what it says: `endless` never ends, `echo` (the default) tells what it was asked.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from types import SimpleNamespace

import minfer
from minfer.errors import ContextOverflowError, RequestError, TemplateError

CALLS: list[dict[str, object]] = []


class FakeGeneration:
    def __init__(self, asked: str, n_predict: int | None, keep=None) -> None:
        self.text, self.finish_reason, self._keep = "", None, keep
        self.usage = SimpleNamespace(prompt_tokens=len(asked), cached_tokens=0, completion_tokens=0)
        self.timings = SimpleNamespace(prefill_seconds=0.5, prefill_rate=20.0, decode_seconds=2.0, decode_rate=4.5)
        how = os.environ.get("FAKE_ANSWER", "echo")
        if how == "endless":
            pieces = itertools.cycle(["on ", "and "])
        elif how == "escape":
            pieces = iter(["\x1b[31mred\x1b]0;title\x07", "\x9b2J\n", "tab\there"])
        else:
            pieces = iter([f"You said: {asked}"])
        self._pieces, self._how = pieces, how

    def __iter__(self):
        return self

    def __next__(self) -> str:
        if self._how == "endless":
            time.sleep(0.005)
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.finish_reason = "context" if self._how == "full" else "stop"
            self.close()
            raise
        self.text += piece
        self.usage.completion_tokens += 1
        return piece

    def close(self) -> None:
        if self._keep:
            keep, self._keep = self._keep, None
            keep(self)


class FakeSession:
    def __init__(self, model, system) -> None:
        self.model = model
        self.messages = [{"role": "system", "content": system}] if system is not None else []

    def send(self, text, **how):
        if text == "too long":
            raise ContextOverflowError("9 tokens do not fit: the context has 8 cells and 5 are in use")
        self.messages.append({"role": "user", "content": text})
        return self._answer(how)

    def regenerate(self, **how):
        if not any(m["role"] == "user" for m in self.messages):
            raise RequestError("there is nothing to answer again: nothing was asked yet")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        return self._answer(how)

    def clear(self) -> None:
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def _answer(self, how):
        generation = self.model.chat(self.messages, **how)
        generation._keep = lambda g: self.messages.append({"role": "assistant", "content": g.text})
        return generation


class FakeModel:
    n_ctx, device = 8, "fake"

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        CALLS.append({"call": "close"})

    @property
    def template(self):
        if os.environ.get("FAKE_TEMPLATE") == "none":
            raise TemplateError("the model has no chat template; use --raw to complete plain text")
        return object()

    def generate(self, prompt, *, n_predict=None, sampling=None, stop=()):
        CALLS.append(
            {"call": "generate", "prompt": prompt, "n_predict": n_predict, "sampling": str(sampling), "stop": stop}
        )
        return FakeGeneration(prompt, n_predict)

    def chat(self, messages, *, n_predict=None, sampling=None, stop=(), **variables):
        _ = self.template
        CALLS.append({"call": "chat", "messages": list(messages), "n_predict": n_predict, "sampling": str(sampling)})
        return FakeGeneration(" | ".join(f"{m['role']}: {m['content']}" for m in messages), n_predict)

    def session(self, system=None):
        return FakeSession(self, system)

    def launches(self, plan):
        return []

    def plan(self, n_tokens=1):
        class Plan:
            def to_json(self):
                return {"n_tokens": n_tokens}

            def __str__(self) -> str:
                return f"a plan for {n_tokens} tokens"

        return Plan()

    def explain(self) -> str:
        return "placement  all on fake"


def load(model, *, progress, **how):
    CALLS.append({"call": "load", **how})
    if os.environ.get("FAKE_UPLOAD"):
        for done in (0, 40, 100):
            progress(done, 100, "uploading weights to fake")
    if how["device"] not in ("auto", "fake"):
        raise minfer.UnsupportedError(f"no device named {how['device']!r}; expected auto or fake")
    return FakeModel()


if __name__ == "__main__":
    from minfer.cli import main

    minfer.load = load
    if "FAKE_TERMINAL" in os.environ:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C at this terminal is a signal for this process
    with tempfile.NamedTemporaryFile(suffix=".gguf") as model:
        arguments = [model.name if word == "MODEL" else word for word in sys.argv[1:]]
        try:
            main(arguments)
        finally:
            if "FAKE_CALLS" in os.environ:
                with open(os.environ["FAKE_CALLS"], "w") as log:
                    json.dump(CALLS, log)
