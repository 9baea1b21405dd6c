"""The engine: a model on its devices, its KV cache, and forward passes over a plan's splits."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.backends import open_backend
from minfer.backends.profile import Profile
from minfer.engine.place import N_BATCH, need, weights_on
from minfer.engine.sampler import Best
from minfer.errors import NumericsError, RequestError, UnsupportedError
from minfer.graph import GraphParams, Node
from minfer.graph.allocate import Allocator
from minfer.graph.cache import GraphCache
from minfer.graph.ir import Input, TopK
from minfer.graph.plan import make_plan
from minfer.kv import CellStore
from minfer.quants import kv_format as parse_kv_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from minfer.backends.base import Backend, Bytes, LaunchList, LaunchTime, Program, Progress
    from minfer.gguf import ModelFile
    from minfer.graph import Placement, Plan
    from minfer.graph.allocate import Split
    from minfer.graph.cache import Compiled
    from minfer.kv import Rows
    from minfer.models import Transformer

F32 = npt.NDArray[np.float32]


class Pass:
    """A pass that was sent: called, it waits, and gives the logits (n_vocab) or the best of them.

    Only then are its tokens in the cache: a pass that nobody calls may be followed by any other. `best` is the token
    that it finds best, empty before.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: list[int],
        k: int | None,
        compiled: Compiled[Program],
        wait: Callable[[], npt.NDArray[Any]],
    ) -> None:
        self.engine = engine
        self.tokens = tokens  # the `best` of the pass before, if that chooses it
        self.k = k
        self.compiled = compiled
        self.best: list[int] = []
        self._wait = wait

    @property
    def n(self) -> int:
        return self.compiled.plan.params.n_tokens

    def __call__(self) -> F32 | Best:
        output = self._wait()
        self.engine.cells.commit(self.tokens)
        if self.k is None:
            logits: F32 = output[0]
            return logits
        best = self.engine.best(output)[0]
        self.best.append(int(best.ids[0]))
        return best


def _shaped(node: Node, raw: Bytes) -> npt.NDArray[Any]:
    """A node's bytes as its value, numpy shape (the logical shape reversed)."""
    return raw.view(np.float32 if node.dtype == "f32" else np.int32).reshape(node.shape[::-1])


class Engine:
    """Weights, KV regions and compiled plans of one model. Closing frees all of it at once.

    Raises `UnsupportedError` where the device named cannot run the model, and `DeviceMemoryError` where the model, its
    KV cache and a batch do not fit.
    """

    def __init__(
        self,
        file: ModelFile,
        arch: Transformer,
        placement: Placement,
        *,
        n_ctx: int,
        kv_format: str = "f32",
        threads: int | None = None,
        unfused: frozenset[str] = frozenset(),
        progress: Progress | None = None,
    ) -> None:
        rows = parse_kv_format(kv_format)
        self.file = file
        self.arch = arch
        self.kv_format = kv_format
        self.placement = placement
        self.unfused = unfused
        self.cells = CellStore(n_ctx)
        self.backends: dict[str, Backend] = {d: open_backend(d, kv_format, threads) for d in placement.devices}
        self.allocator = Allocator(self.backends)
        self.cache: GraphCache[Program] = GraphCache(arch.build, self.backends, self.allocator, self._compile)
        self._last: Compiled[Program] | None = None
        self._running = threading.Lock()
        try:
            plan = self.plan(min(N_BATCH, n_ctx))
            for name, backend in self.backends.items():
                need(backend, arch, plan, n_ctx).check(backend.memory())
                weights = sorted(weights_on(plan, name), key=lambda weight: weight.name)
                backend.load_weights(file, weights, progress)
            for layer, name in enumerate(placement.layers):
                self.backends[name].add_kv_region(layer, n_ctx, self.n_kv_values, rows)
        except BaseException:
            for backend in self.backends.values():
                backend.close()
            raise

    @property
    def n_ctx(self) -> int:
        return self.cells.n_cells

    @property
    def n_kv_values(self) -> int:
        """Numbers in one K or V row of a layer."""
        return self.arch.n_kv_head * self.arch.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV regions."""
        return 2 * self.arch.n_layer * self.n_ctx * parse_kv_format(self.kv_format).row_bytes(self.n_kv_values)

    def params(
        self, n_tokens: int, n_outputs: int = 1, *, window: int = 0, trace: bool = False, top_k: int | None = None
    ) -> GraphParams:
        return GraphParams(n_tokens, n_outputs, self.placement, self.kv_format, window, self.unfused, trace, top_k)

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """The plan of a step, made for looking at: no memory is taken."""
        return make_plan(self.arch.build, self.params(n_tokens, n_outputs), self.backends, Allocator(self.backends))

    def launches(self, plan: Plan) -> list[tuple[Split, LaunchList | None]]:
        """The splits of a plan and what each would launch; None where a device runs no kernels of ours."""
        return [(split, self.backends[split.device].launches(plan, split)) for split in plan.splits]

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Run `tokens` after those in the cache, in batches; the logits (n_vocab) after the last one.

        Raises `ContextOverflowError` before anything runs if they do not fit.
        """
        logits = self.submit(tokens)()
        assert not isinstance(logits, Best)
        return logits

    def prefill_best(self, tokens: Sequence[int], k: int) -> Best:
        """`prefill`, of whose logits only the `k` best leave the device."""
        best = self.submit(tokens, k)()
        assert isinstance(best, Best)
        return best

    def submit(self, tokens: Sequence[int], k: int | None = None, *, keep: bool = True) -> Pass:
        """`prefill` (of the `k` best), which returns when the last batch is on its way; the result is called for.

        With `keep=False` it is good until the next pass only, and not copied where that can be spared.
        """
        if not tokens:
            raise RequestError("nothing to run: the prompt has no tokens")
        self.cells.require(len(tokens))
        start = (len(tokens) - 1) // N_BATCH * N_BATCH
        before: Callable[[], object] | None = None
        for first in range(0, start, N_BATCH):
            batch = list(tokens[first : first + N_BATCH])
            sent = self._send(batch, self.cells.rows(len(batch)), 0, k)[1]
            self.cells.commit(batch)
            if before is not None:  # two at most are under way: a device gives a wait so long, whatever waits with it
                before()
            before = sent
        last = list(tokens[start:])
        compiled, wait = self._send(last, self.cells.rows(len(last)), 1, k, keep)
        if before is not None:
            before()
        return Pass(self, last, k, compiled, wait)

    def greedy(self, tokens: Sequence[int], k: int = 1, n: int | None = None) -> Iterator[Pass]:
        """The pass of `tokens` (of the `k` best), then that of the token it found best, and so on: `n` passes in all.

        Each is to be called before the next is asked for. Where the device can, a pass is sent while the one before
        runs, and takes its token on the device: one too many when the caller stops, which leaves nothing in the cache.
        """
        step = self.submit(tokens, k, keep=False)
        for sent in itertools.count(1):
            ahead = self._follow(step, k) if sent != n else None
            yield step
            if sent == n:
                return
            step = ahead or self.submit(step.best, k, keep=False)

    def _follow(self, before: Pass, k: int) -> Pass | None:
        """The pass of the token that `before` finds best, sent before that is known; None where it must be known."""
        whole = len(self.backends) == 1
        if not whole or not self.backends[self.placement.output].chains or self.cells.free <= before.n:
            return None
        compiled, wait = self._send(before.best, self.cells.rows(1, after=before.n), 1, k, before=before)
        return Pass(self, before.best, k, compiled, wait)

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass that was submitted runs while the host does something else."""
        return self.backends[self.placement.output].runs_ahead

    def ranks(self, k: int) -> bool:
        """Whether the device of the logits can give their `k` best."""
        node = Node(-1, "top_k", TopK(k), (), (2 * k + 1, 1), "i32")
        return self.backends[self.placement.output].supports(node) is None

    def forward(self, tokens: Sequence[int], rows: Rows, n_outputs: int, *, keep: bool = True) -> F32:
        """One pass: logits `(n_outputs, n_vocab)` of the last `n_outputs` tokens. The KV rows given are written.

        With `keep=False` the logits are good until the next pass only.
        Raises `NumericsError` naming the first node with NaN or Inf if the logits have any.
        """
        return self._send(tokens, rows, n_outputs, None, keep)[1]()

    def forward_best(self, tokens: Sequence[int], rows: Rows, n_outputs: int, k: int) -> list[Best]:
        """`forward`, of whose rows of logits only the `k` best leave the device."""
        return self.best(self._send(tokens, rows, n_outputs, k)[1]())

    def _send(
        self,
        tokens: Sequence[int],
        rows: Rows,
        n_outputs: int,
        top_k: int | None,
        keep: bool = True,
        before: Pass | None = None,
    ) -> tuple[Compiled[Program], Callable[[], npt.NDArray[Any]]]:
        """Write the inputs and run; what is returned waits, and reads and checks the output. The token that `before`
        finds best is taken from its output; `tokens` need not be known then until the wait."""
        self._check_tokens(tokens)
        params = self.params(len(rows.positions), n_outputs, window=rows.layout, top_k=top_k)
        compiled = self._run(params, tokens, rows, before)
        plan = compiled.plan
        backend = self.backends[self.placement.output]
        fetched = None
        if backend.chains and top_k is not None and n_outputs:  # a few words; all logits may be many megabytes
            node = plan.graph.nodes[plan.graph.outputs[0]]
            fetched = backend.fetch(self.allocator.buffer(plan.slot(node)), node.nbytes)
        elif backend.chains and not n_outputs:  # a word of an input, which comes when the pass has ended
            node = next(node for node in plan.graph if isinstance(node.op, Input))
            fetched = backend.fetch(self.allocator.buffer(plan.slot(node)), 4)

        def wait() -> npt.NDArray[Any]:
            if not n_outputs:
                if fetched is not None:
                    fetched()
                return np.zeros((0, self.arch.n_vocab), np.float32)
            node = plan.graph.nodes[plan.graph.outputs[0]]
            output = self._value(plan, node, keep) if fetched is None else _shaped(node, fetched())
            logits = output if top_k is None else output[:, top_k:].view(np.float32)  # what is no number comes first
            if not np.isfinite(logits).all():
                self._name_bad_node(tokens, rows, n_outputs)
            return output

        return compiled, wait

    @staticmethod
    def best(words: npt.NDArray[np.int32]) -> list[Best]:
        k = words.shape[1] // 2
        values = words.view(np.float32)
        return [Best(words[i, :k], values[i, k : 2 * k], float(values[i, 2 * k])) for i in range(len(words))]

    def trace(self, tokens: Sequence[int], rows: Rows, n_outputs: int) -> Iterator[tuple[Node, npt.NDArray[Any]]]:
        """Run with every value kept and give each node's, in build order. KV rows are written, not given."""
        params = self.params(len(tokens), n_outputs, window=rows.layout, trace=True)
        compiled = self._run(params, tokens, rows)
        for node in compiled.plan.graph:
            if node.dtype != "none" and not isinstance(node.op, Input):
                yield node, self._value(compiled.plan, node)

    def start_profile(self) -> Profile:
        """Measure where host time goes from now on."""
        profile = Profile()
        for backend in self.backends.values():
            backend.profile = profile
        return profile

    def launch_times(self) -> dict[str, list[LaunchTime] | str]:
        """The launches of the last step by their device's clock, or why a device has none.

        The step runs once more for it, with the inputs it had, so that it leaves the same values and KV rows behind.
        """
        found: dict[str, list[LaunchTime] | str] = {}
        compiled = self._last
        for split, program in zip(compiled.plan.splits, compiled.programs, strict=True) if compiled else ():
            try:
                times = self.backends[split.device].launch_times(program)
            except UnsupportedError as error:
                found[split.device] = str(error)
            else:
                before = found.get(split.device)
                found[split.device] = (before if isinstance(before, list) else []) + times
        return found

    def close(self) -> None:
        """Give everything back, after the step that another thread is at."""
        with self._running:
            self._last = None
            self.allocator.close()
            for backend in self.backends.values():
                backend.close()
            self.file.close()

    # --- a pass --------------------------------------------------------------------------------------------------

    def _run(
        self, params: GraphParams, tokens: Sequence[int], rows: Rows, before: Pass | None = None
    ) -> Compiled[Program]:
        """Raises `RequestError` where another thread is at it: values and programs are one step's at a time."""
        if not self._running.acquire(blocking=False):
            raise RequestError(
                "this model runs a step on another thread: wait for it there, or load one model for each thread"
            )
        try:
            return self._step(params, tokens, rows, before)
        finally:
            self._running.release()

    def _step(self, params: GraphParams, tokens: Sequence[int], rows: Rows, before: Pass | None) -> Compiled[Program]:
        compiled = self.cache.get(params)
        plan = compiled.plan
        n, m = params.n_tokens, params.n_outputs
        for index, device, kind in plan.inputs:
            here = self.allocator.buffer(plan.slots[index, device])
            if kind == "token_ids" and before is not None:
                chosen = before.compiled.plan  # its output begins with the best token
                there = self.allocator.buffer(chosen.slot(chosen.graph.nodes[chosen.graph.outputs[0]]))
                self.backends[device].copy(there, here, 4)
                continue
            if kind == "token_ids":
                data = np.array(tokens, np.int32)
            elif kind == "tail_ids":
                data = np.arange(n - m, n, dtype=np.int32)
            else:
                data = getattr(rows, kind)
            self.backends[device].write(here, data)
        for split, program in zip(plan.splits, compiled.programs, strict=True):
            for index in split.receives:
                node = plan.graph.nodes[index]
                here = self.allocator.buffer(plan.slots[index, split.device])
                self.backends[split.device].write(here, self._value(plan, node))
            program.run()
        self._last = compiled
        return compiled

    def _value(self, plan: Plan, node: Node, keep: bool = True) -> npt.NDArray[Any]:
        """A node's value, numpy shape (the logical shape reversed): a copy, unless it need not be kept."""
        backend = self.backends[node.device]
        raw = (backend.read if keep else backend.view)(self.allocator.buffer(plan.slot(node)), node.nbytes)
        return _shaped(node, raw)

    def _compile(self, plan: Plan, split: Split) -> Program:
        device = split.device
        return self.backends[device].compile(
            plan, split, lambda index: self.allocator.buffer(plan.slots[index, device])
        )

    def _name_bad_node(self, tokens: Sequence[int], rows: Rows, n_outputs: int) -> None:
        for node, value in self.trace(tokens, rows, n_outputs):
            bad = np.argwhere(~np.isfinite(value))
            if len(bad):
                weights = ", ".join(w.name for w in node.weights) or "no weights"
                raise NumericsError(
                    f"{node.name} ({node.kind} on {node.device}, {weights}) gives {len(bad):,} NaN or Inf of "
                    f"{value.size:,} values, the first at {bad[0][::-1].tolist()} (feature, token); every node before "
                    "it is finite. The model file is damaged, or this is a bug: try another file or device"
                )
        raise NumericsError("the logits have NaN or Inf, but a traced run of the same step has none: please report it")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.arch.n_vocab:
                raise RequestError(f"token id {token} is not among the {self.arch.n_vocab:,} rows of the embedding")
