"""The CUDA device on a real GPU: what the tests can only pretend.

    python tests/tools/on_gpu.py simulator FILE   # anywhere: the simulator's logits of the tiny models
    python tests/tools/on_gpu.py cuda FILE        # where there is a GPU: compares; replay, contexts, faults

Prints a line a check and exits with 1 where one failed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import cuda
from minfer.backends.gpu.devices.cuda import CudaDevice
from minfer.engine.engine import Engine
from minfer.engine.place import place
from minfer.errors import MinferError, RequestError
from minfer.gguf import open_model
from minfer.models import load_architecture
from minfer.msl import nvrtc
from minfer.msl.library import Library

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = Path(__file__).parents[1] / "data" / "tiny"
FORMATS = ("f32", "f16", "q8_0")
#: Largest difference of a model's logits over their root mean square: prompts of more than 8 tokens are multiplied with
#: inputs of 11 bits, and the rest of the passes read the KV rows that come of it.
BOUND = 2e-2
PROMPT = [3, 17, 5, 80, 41, 2, 9, 33, 64, 7, 21, 50]
SPIN = "kernel void spin(volatile device uint * x [[buffer({slot})]]) {{ while (x[0] != 0xABCDEF01u) {{}} }}"


def opened(path: Path, device: str, n_ctx: int, kv_format: str = "f32") -> Engine:
    file = open_model(path)
    arch = load_architecture(file)
    return Engine(file, arch, place(arch, device, kv_format), n_ctx=n_ctx, kv_format=kv_format)


def logits(path: Path, device: str, kv_format: str, n: int = 12) -> np.ndarray[Any, Any]:
    """A prompt, then `n` given tokens one by one: (n + 1, vocabulary)."""
    engine = opened(path, device, 256, kv_format)
    rows = [engine.prefill(PROMPT)]
    rows += [engine.prefill([(7 * i + 3) % 90]) for i in range(n)]
    engine.close()
    return np.stack(rows)


def greedy(name: str, n: int, n_ctx: int, prompt: list[int] = PROMPT) -> bytes:
    engine = opened(TINY / f"{name}.gguf", "cuda", n_ctx)
    row, out = engine.prefill(prompt), b""
    for _ in range(n):
        out += row.tobytes()
        row = engine.prefill([int(np.argmax(row))])
    engine.close()
    return out


def same_logits(file: Path) -> str:
    """q8_0 rows may differ by whole codes, where a value falls to the other side of a rounding: there, the logits may
    differ by as much as the format itself moves them, which the simulator's f32 rows tell."""
    wanted, kept = np.load(file), 0
    worst = dict.fromkeys(FORMATS, (0.0, 0.0, ""))
    for name in wanted:
        want = wanted[name]
        model, _, kv_format = name.partition("/")
        got = logits(TINY / f"{model}.gguf", "cuda", kv_format)
        scale = float(np.sqrt(np.mean(want**2)))
        off = float(np.abs(got - want).max()) / scale
        allowed = BOUND
        if kv_format == "q8_0":
            allowed = max(BOUND, float(np.abs(wanted[f"{model}/f32"] - want).max()) / scale)
        assert off <= allowed, f"{name}: off by {off:.1e}, allowed {allowed:.1e}"
        worst[kv_format] = max(worst[kv_format], (off, allowed, model))
        ordered = np.sort(want)
        clear = ordered[:, -1] - ordered[:, -2] > 2 * allowed * scale
        assert np.array_equal(got.argmax(1)[clear], want.argmax(1)[clear]), f"{name}: another token"
        kept += int(clear.sum())
    said = "; ".join(f"{kv}: off by up to {off:.1e} of {a:.1e} ({model})" for kv, (off, a, model) in worst.items())
    return f"{len(wanted.files)} models and KV formats, {kept} clear arg-maxes equal; {said}"


def replay_is_direct() -> str:
    replayed = greedy("llama-linear", 300, 320)

    class Direct:
        def __init__(self, device: CudaDevice, steps: Any) -> None:
            self.run: Callable[[], None] = lambda: device.encode(steps)

    with mock.patch.object(CudaDevice, "record", lambda self, steps: Direct(self, steps)):
        direct = greedy("llama-linear", 300, 320)
    assert replayed == direct
    return "300 tokens, the same bits"


def contexts_agree() -> str:
    """Around the border at which a window is read in parts: once with the border there, once far behind."""
    prompt = [(5 * i + 3) % 90 for i in range(cuda.WHOLE_ROWS - 10)]
    parts = np.frombuffer(greedy("qwen3", 20, 600, prompt), np.float32).reshape(20, -1)
    with mock.patch.object(cuda, "WHOLE_ROWS", 2 * cuda.WHOLE_ROWS):
        whole = np.frombuffer(greedy("qwen3", 20, 600, prompt), np.float32).reshape(20, -1)
    off = np.abs(parts - whole).max(1) / np.sqrt(np.mean(whole**2))
    assert not off[:11].any(), "rows before the border differ"  # the prompt's, then 10 up to the border
    assert 0 < off[11:].max() <= 2e-4, off
    return f"the same bits up to {cuda.WHOLE_ROWS} rows, off by up to {off.max():.1e} from there"


def refusal(call: Callable[[], object], words: str) -> str:
    """What a call that must fail says."""
    try:
        call()
    except MinferError as error:
        said = str(error)
    else:
        said = "nothing"
    if words not in said:
        raise AssertionError(f"expected {words!r}, was told {said!r}")
    return said


def memory_runs_out() -> str:
    device = CudaDevice()
    known = device.memory()
    assert known
    said = refusal(lambda: device.buffer(known[1] + 1, "too much"), f"{known[1] + 1:,} bytes asked for")
    assert device.memory() == known, "something leaked"
    device.close()
    return said


def _steps() -> tuple[Any, CudaDevice, Any]:
    engine = opened(TINY / "qwen3.gguf", "cuda", 256)
    engine.prefill(PROMPT)
    backend = engine.backends["cuda"]
    assert isinstance(backend, GpuBackend)
    assert isinstance(backend.device, CudaDevice)
    steps = engine.cache.get(engine.params(len(PROMPT), 1)).programs[0].steps
    return engine, backend.device, steps[0]


def _dead(device: CudaDevice, words: str) -> str:
    said = refusal(device.synchronize, words)
    refusal(lambda: device.buffer(16, "after"), "must be opened anew")
    return said


def wild_pointer() -> str:
    _engine, device, step = _steps()
    lost = dataclasses.make_dataclass("Lost", [("address", int)])(1 << 52)
    device.encode([dataclasses.replace(step, bound=tuple(dataclasses.replace(b, buffer=lost) for b in step.bound))])
    return _dead(device, "ILLEGAL_ADDRESS")


def endless_kernel() -> str:
    _engine, device, step = _steps()
    device._timeout_s = 1.0
    unit = Library(SPIN.format(slot=step.bound[0].slot)).unit
    module = nvrtc.module(unit, [("spin", {})], device._arch)
    symbol, slots = module.entries["spin", ()]
    function = device.call("cuModuleGetFunction", device.call("cuModuleLoadData", module.cubin), symbol.encode())
    device._functions[step.launch.family, step.launch.kernel, step.launch.constants] = function, slots
    device.encode([step])
    return _dead(device, "no end within 1 s; the last launches were")


FAULTS = (memory_runs_out, wild_pointer, endless_kernel)


def attempt(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok    {name}: {check()}", flush=True)
    except Exception as error:
        print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main() -> int:
    where, file = sys.argv[1:3]
    if where == "simulator":
        found: dict[str, Any] = {}
        for path in sorted(TINY.glob("*.gguf")):
            for kv_format in FORMATS:
                try:
                    found[f"{path.stem}/{kv_format}"] = logits(path, "simulator", kv_format)
                except RequestError as error:  # rows that are not whole blocks
                    print(f"{path.stem}: {error}")
        np.savez_compressed(file, **found)
        return 0
    if where != "cuda":  # one fault, in a process of its own: nothing can follow it
        ok = attempt(where, next(f for f in FAULTS if f.__name__ == where))
        os._exit(0 if ok else 1)
    good = attempt("logits against the simulator", lambda: same_logits(Path(file)))
    good &= attempt("replay against direct launches", replay_is_direct)
    good &= attempt("sizes of context", contexts_agree)
    for fault in FAULTS:
        good &= os.spawnl(os.P_WAIT, sys.executable, sys.executable, __file__, fault.__name__, file) == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
