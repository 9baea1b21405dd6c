"""The CUDA device over a pretended driver: the simulator's bits, direct and replayed, and what each fault says."""

from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import fakecuda
import numpy as np
import pytest
from fakecuda import FakeCuda, Result

from helpers import TINY, TINY_MODELS, open_engine
from minfer import backends, cases
from minfer.backends import open_backend
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import cuda
from minfer.backends.gpu.devices.cuda import CudaDevice
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.launch import hazards
from minfer.backends.reference import ReferenceBackend
from minfer.engine import engine as engines
from minfer.engine.place import place
from minfer.errors import DeviceError, DeviceMemoryError, UnsupportedError
from minfer.gguf import open_model
from minfer.models import load_architecture
from minfer.msl import nvrtc
from minfer.msl.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

    from minfer.engine.engine import Engine

PROMPT = [1, 5, 9, 2, 7]


def same_tiers(monkeypatch: pytest.MonkeyPatch, machine: FakeCuda) -> None:
    """The simulator lowers as the CUDA device does."""
    device = CudaDevice()
    own = {
        name: getattr(device.profile, name)
        for name in ("extra", "whole_rows", "split_rows", "max_splits", "cores", "max_threadgroup_bytes")
    }
    device.close()
    original = SimulatorDevice.__init__

    def init(self: SimulatorDevice, **options: Any) -> None:
        original(self, **options)
        self.profile = dataclasses.replace(self.profile, **own)

    monkeypatch.setattr(SimulatorDevice, "__init__", init)


def follow(engine: Engine, n: int, prompt: list[int] = PROMPT) -> list[bytes]:
    """Greedy decoding: the logits of each step, as bytes."""
    logits, out = engine.prefill(prompt), []
    for _ in range(n):
        out.append(logits.tobytes())
        logits = engine.prefill([int(np.argmax(logits))])
    engine.close()
    return out


def run(path: Path, device: str, n: int, **options: Any) -> list[bytes]:
    return follow(open_engine(path, device=device, **options), n)


# --- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_give_the_simulators_bits(name: str, machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    same_tiers(monkeypatch, machine)
    path = TINY / f"{name}.gguf"
    assert run(path, "cuda", 5) == run(path, "simulator", 5)
    assert machine.calls.count("cuGraphLaunch") >= 3  # from the second step of its kind on, it is a graph
    assert any("attention_wide" in name for name in machine.launched)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of up to 32 rows are read whole, of 64 in two parts, and so on."""
    monkeypatch.setattr(cuda, "WHOLE_ROWS", 32)
    monkeypatch.setattr(cuda, "SPLIT_ROWS", 32)


@pytest.mark.usefixtures("small_buckets")
def test_replay_is_direct_over_300_tokens_with_growing_context(
    machine: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TINY / "llama-linear.gguf"
    replayed = run(path, "cuda", 300, n_ctx=320)
    graphs = machine.calls.count("cuGraphLaunch")
    assert graphs == 295  # each of five buckets runs once without a graph
    assert {"attention_wide_g1", "attention_combine"} <= set(machine.launched)

    class Direct:
        def __init__(self, device: CudaDevice, steps: Any) -> None:
            self.run = lambda: device.encode(steps)

    monkeypatch.setattr(CudaDevice, "record", lambda self, steps: Direct(self, steps))
    assert run(path, "cuda", 300, n_ctx=320) == replayed
    assert machine.calls.count("cuGraphLaunch") == graphs


def test_context_buckets_agree_at_their_borders(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in parts: other programs of one graph, other sums, the same attention within its class."""
    path, prompt = TINY / "qwen3.gguf", [1 + i % 11 for i in range(120)]
    whole = follow(open_engine(path, device="cuda", n_ctx=160), 30, prompt)
    assert "attention_combine" not in machine.launched
    monkeypatch.setattr(cuda, "WHOLE_ROWS", 128)  # which eight simdgroups take at a time
    engine = open_engine(path, device="cuda", n_ctx=160)
    parts = follow(engine, 30, prompt)
    assert engine.cache.built == 2  # a graph for the prompt and one for a token
    assert "attention_combine" in machine.launched
    rows = range(len(prompt), len(prompt) + 30)  # of the windows that gave the logits
    for n, a, b in zip(rows, whole, parts, strict=True):
        assert (a == b) == (n <= 128), f"{n} rows"
        assert cases.error(np.frombuffer(b, np.float32), np.frombuffer(a, np.float32)) <= cases.BOUNDS["attention"]


def test_a_growing_context_compiles_nothing(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a kind brings the kernels of all its context buckets."""
    monkeypatch.setattr(cuda, "WHOLE_ROWS", 16)
    monkeypatch.setattr(cuda, "SPLIT_ROWS", 16)
    engine = open_engine(TINY / "qwen3.gguf", device="cuda", n_ctx=60)
    engine.prefill(PROMPT)
    engine.prefill([1])
    modules = machine.calls.count("cuModuleLoadData")
    for _ in range(40):
        engine.prefill([1])
    assert "attention_combine" in machine.launched
    assert machine.calls.count("cuModuleLoadData") == modules
    engine.close()


def test_the_launch_after_attention_is_placed_when_it_has_ended(machine: FakeCuda) -> None:
    """All others with one launch before them have a programmatic edge."""
    engine = open_engine(TINY / "qwen3.gguf", device="cuda")
    for token in (1, 2, 3):
        engine.prefill([token])
    steps = engine.cache.get(engine.params(1)).programs[0].steps
    edges = hazards([step.launch for step in steps])
    chained = sum(len(after) == 1 for after in edges)
    assert chained > 3 * engine.arch.n_layer
    assert machine.calls.count("cuGraphAddDependencies") == chained - engine.arch.n_layer
    engine.close()


def test_two_engines_share_kernels_and_nothing_else(machine: FakeCuda) -> None:
    path = TINY / "qwen3.gguf"
    first = open_engine(path, device="cuda", kv_format="f32")
    modules = machine.calls.count("cuModuleLoadData")
    second = open_engine(path, device="cuda", kv_format="f16")
    a, b = first.prefill(PROMPT), second.prefill(PROMPT)
    second.close()
    assert np.abs(a - b).max() < 1e-2
    assert np.array_equal(first.prefill([3]), open_and_continue(path))
    assert machine.calls.count("cuModuleLoadData") > modules
    first.close()


def open_and_continue(path: Path) -> Any:
    engine = open_engine(path, device="reference", kv_format="f32")
    engine.prefill(PROMPT)
    got = engine.prefill([3])
    engine.close()
    other = open_engine(path, device="cuda", kv_format="f32")
    other.prefill(PROMPT)
    out = other.prefill([3])
    other.close()
    np.testing.assert_allclose(out, got, atol=1e-3)
    return out


@pytest.mark.parametrize(
    "name", ["project/swiglu/Q4_K/n1", "project/norm_qkv/n1", "project/add/n9", "top_k/", "attn/f16/head64/n12"]
)
def test_cases_run_on_it(name: str, machine: FakeCuda) -> None:
    case = next(c for c in cases.all_cases() if c.name.startswith(name))
    backend = GpuBackend(CudaDevice(), case.kv_format)
    bound = backend.bound(
        next(n for n in case.graph("cuda") if n.kind == type(case.op).__name__), case.kind, cases.BOUNDS[case.kind]
    )
    got, want = cases.run(case, backend), cases.run(case, ReferenceBackend(case.kv_format))
    for g, w in zip(got, want, strict=True):
        assert cases.error(g, w) <= bound
    backend.close()
    assert case.kind != "attention" or any("attention_mma" in name for name in machine.launched)


def test_copies_larger_than_the_staging_memory(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "STAGING", 4096)
    device = CudaDevice()
    data = np.random.default_rng(0).integers(0, 256, 10_001, np.uint8).tobytes()
    a, b = device.buffer(len(data) + 7, "a"), device.buffer(len(data), "b")
    device.write(a, 7, data)
    device.copy(a, 7, b, 0, len(data))
    assert device.read(b, 0, len(data)) == data
    assert device.read(a, 0, 7) == bytes(7)  # new memory is zero
    device.close()


def test_times_are_those_of_the_devices_clock(machine: FakeCuda) -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cuda")
    engine.prefill(PROMPT)
    program = engine.cache.get(engine.params(len(PROMPT))).programs[0]
    times = engine.backends["cuda"].launch_times(program)
    assert [t.seconds for t in times] == [0.001] * len(program.steps)
    engine.close()


# --- faults ------------------------------------------------------------------------------------------------------


def test_a_missing_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "nvidia_driver", lambda: None)
    for name in ("cuda", "cuda.bindings"):  # one may be loaded already
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"needs NVIDIA's Python binding .*pip install 'minfer\[cuda\]'"):
        open_backend("cuda", "f32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": Result.CUDA_ERROR_NO_DEVICE}, "sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"start": Result.CUDA_ERROR_SYSTEM_NOT_READY}, r"does not start \(CUDA_ERROR_SYSTEM_NOT_READY\)"),
        ({"version": 12020}, "supports CUDA 12.2; minfer needs 12.4 or later: update the driver"),
        (
            {"attributes": fakecuda.ATTRIBUTES | {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 7}},
            r"compute capability 7.0; minfer's kernels need 8.0 \(Ampere\) or later",
        ),
    ],
)
def test_what_is_missing_or_too_old_is_a_sentence(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakecuda.install(monkeypatch, FakeCuda(**change))
    with pytest.raises(UnsupportedError, match=words):
        open_backend("cuda", "f32")


def test_without_a_driver_nothing_of_a_gpu_is_imported() -> None:
    """`auto` asks for it on every start, where most machines have none."""
    script = """
import ctypes, sys
def missing(name): raise OSError(f"{name} is not there")
ctypes.CDLL = missing
from minfer.backends import UnsupportedError, open_backend
try:
    open_backend("cuda", "f32")
except UnsupportedError as error:
    print(error)
print(sorted(name for name in sys.modules if name.startswith(("cuda", "minfer.backends.gpu", "minfer.msl"))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ("no NVIDIA driver was found (libcuda.so.1 is not there): install the GPU's driver\n[]\n")


def test_a_missing_driver_is_a_sentence(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 is not there")

    monkeypatch.setattr(sys.modules["cuda.bindings"].driver, "cuInit", missing)
    with pytest.raises(UnsupportedError, match=r"no NVIDIA driver was found \(libcuda.so.1 is not there\): install"):
        open_backend("cuda", "f32")


def test_a_missing_nvrtc_is_a_sentence(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ToolError(nvrtc.MISSING)

    monkeypatch.setattr(nvrtc, "version", missing)
    with pytest.raises(
        UnsupportedError, match=r"compiled by NVRTC: NVRTC is not installed.*pip install 'minfer\[cuda\]'"
    ):
        open_backend("cuda", "f32")


def test_kernels_that_do_not_compile_are_named(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise ToolError("line 7 is wrong")

    monkeypatch.setattr(nvrtc, "module", refuse)
    engine = open_engine(TINY / "qwen3.gguf", device="cuda")
    with pytest.raises(UnsupportedError, match=r"\w+\.metal does not compile for Pretended GPU \(sm_90\): line 7"):
        engine.prefill(PROMPT)
    engine.close()


def test_out_of_memory_has_both_numbers_and_leaks_nothing(machine: FakeCuda) -> None:
    device = CudaDevice()
    machine.capacity = 5000
    kept = device.buffer(3000, "kept")
    with pytest.raises(
        DeviceMemoryError, match=r"weights: 4,000 bytes asked for, 2,000 of 5,000 bytes free on Pretended"
    ):
        device.buffer(4000, "weights")
    assert device.memory() == (2000, 5000)
    device.write(kept, 0, b"still")
    assert device.read(kept, 0, 5) == b"still"
    device.close()


def test_no_memory_for_a_graph_is_not_the_end(machine: FakeCuda) -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cuda")
    engine.prefill(PROMPT)
    machine.full = "cuGraphInstantiate"
    with pytest.raises(DeviceMemoryError, match="Pretended GPU has no memory left for cuGraphInstantiate"):
        engine.prefill(PROMPT)
    machine.full = ""
    assert np.isfinite(engine.prefill(PROMPT)).all()
    engine.close()
    del engine
    gc.collect()
    assert (machine.memory, machine.pinned, machine.live, machine.graphs) == ({}, {}, set(), 0)


def test_a_gpu_without_room_for_a_context_is_left_to_others(machine: FakeCuda) -> None:
    machine.full = "cuDevicePrimaryCtxRetain"
    with pytest.raises(UnsupportedError, match="the GPU cannot be used now: Pretended GPU has no memory left"):
        CudaDevice()
    arch = load_architecture(open_model(TINY / "qwen3.gguf"))
    assert "cuda" not in place(arch, "auto", "f32").devices


def test_a_refused_engine_gives_its_device_back(machine: FakeCuda) -> None:
    with pytest.raises(DeviceMemoryError, match="free"):
        open_engine(TINY / "qwen3.gguf", device="cuda", n_ctx=1 << 22)
    assert (machine.memory, machine.pinned, machine.live) == ({}, {}, set())


@pytest.mark.parametrize("closed", [True, False])
def test_what_one_thread_opened_another_gives_back(closed: bool, machine: FakeCuda) -> None:
    """Closed there, or dropped and collected there."""
    engine: Engine | None = open_engine(TINY / "qwen3.gguf", device="cuda")
    assert engine
    for _ in range(2):
        engine.prefill(PROMPT)
    assert machine.graphs == 1
    with ThreadPoolExecutor(1) as other:
        if closed:
            other.submit(engine.close).result()
        engine = None
        other.submit(gc.collect).result()
    assert (machine.memory, machine.pinned, machine.live, machine.graphs) == ({}, {}, set(), 0)


def test_of_a_long_prompt_two_batches_are_under_way(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "N_BATCH", 8)
    engine = open_engine(TINY / "qwen3.gguf", device="cuda", n_ctx=64)
    machine.calls.clear()
    engine.prefill([*range(60)])
    ahead, most = 0, 0
    for call in machine.calls:
        ahead += (call == "cuEventRecord") - (call == "cuEventQuery")  # here an event has always come
        most = max(most, ahead)
    assert (machine.calls.count("cuEventRecord"), ahead, most) == (7, 0, 2)  # and the last batch's result
    engine.close()


def test_a_fault_ends_the_device_and_names_the_launches(machine: FakeCuda) -> None:
    engine = open_engine(TINY / "qwen3.gguf", device="cuda")
    engine.prefill(PROMPT)
    machine.fault = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(
        DeviceError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access.*last launches were .*\("
    ):
        engine.prefill([3])
    with pytest.raises(DeviceError, match=r"no longer used and must be opened anew: .*ILLEGAL_ADDRESS"):
        engine.prefill([4])
    engine.close()


def test_a_kernel_that_never_ends_is_given_up(machine: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SPIN_S", 0.0)
    device = CudaDevice(timeout_s=0.05)
    backend = GpuBackend(device)
    case = next(c for c in cases.all_cases() if c.name == "rms_norm/33x1")
    machine.hangs = True
    with pytest.raises(DeviceError, match=r"no end within 0.05 s; the last launches were .*\(rms_norm\)"):
        cases.run(case, backend)
    with pytest.raises(DeviceError, match="must be opened anew"):
        device.synchronize()
    freed = machine.calls.count("cuMemFree")
    device.close()
    assert machine.calls.count("cuMemFree") == freed  # to free would wait for what does not end


def test_memory_outside_an_allocation_is_a_fault(machine: FakeCuda) -> None:
    """The pretended driver bites: a copy past a buffer's end."""
    device = CudaDevice()
    small = device.buffer(100, "small")
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        device.write(small, 64, bytes(64))


def test_the_pretended_driver_has_the_bindings_signatures() -> None:
    """Every call that is pretended exists in NVIDIA's binding, with that many arguments."""
    driver = pytest.importorskip("cuda.bindings.driver")
    names = [name for name in dir(FakeCuda) if name.startswith("cu")]
    assert len(names) > 25
    for name in names:
        signature = (getattr(driver, name).__doc__ or "").splitlines()[0]
        inside = signature.partition("(")[2].rpartition(")")[0]
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
        real = [part for part in inside.split(",") if part.strip()]
        pretended = getattr(FakeCuda, name).__code__.co_argcount - 1
        assert pretended == len(real), f"{name}: {signature}"
    for name in fakecuda.ATTRIBUTES:
        assert hasattr(driver.CUdevice_attribute, name)
    for result in Result:
        assert getattr(driver.CUresult, result.name) == result.value
