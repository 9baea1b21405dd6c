"""NVIDIA GPUs: the Metal kernels, translated and compiled by NVRTC, driven through NVIDIA's binding of the driver API.

The driver API, not cuda-core's launcher, because a launch here carries its argument struct by value and its graph edges
are programmatic: the next kernel is placed while the last one ends. One stream; a recording is a CUDA graph whose edges
are the hazards of its launches. A wait is bounded; after a fault the device refuses further work.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.backends.gpu.devices.base import Device
from minfer.backends.gpu.devices.cuda_fetch import Fetch, Fetches
from minfer.backends.gpu.kernels import source
from minfer.backends.gpu.launch import hazards
from minfer.backends.gpu.lower import Profile
from minfer.backends.gpu.lower.choose import EXTRA, MAX_SPLITS, tiers_off
from minfer.errors import DeviceError, DeviceMemoryError, UnsupportedError
from minfer.msl import nvrtc
from minfer.msl.errors import MslError, ToolError
from minfer.msl.library import Library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.backends.gpu.devices.base import Step
    from minfer.backends.gpu.launch import Constant, Launch
    from minfer.msl.emit_cuda import Entry
    from minfer.msl.unit import Unit

INSTALL = "pip install 'minfer[cuda]'"
#: The driver's CUDA version that graphs with programmatic edges and NVRTC's wheels need.
LEAST_DRIVER = (12, 4)
#: Compute capability of the first GPUs whose kernels are compiled: what the translated source asks for.
LEAST_CAPABILITY = (8, 0)
#: Seconds that a wait may take; then the device is given up.
TIMEOUT_S = 60.0
#: A wait asks again and again for this long before it sleeps between questions.
SPIN_S = 0.005
#: Bytes of pinned memory through which the host writes and reads, in two halves that take turns.
STAGING = 32 << 20
#: Kernel variants in one compilation: few enough that the processors share the work.
CHUNK = 20
#: Rows of a window up to which one threadgroup reads them all, and rows of a part beyond.
WHOLE_ROWS, SPLIT_ROWS = 512, 128
#: Families that the next launch does not overlap: what it and those after it ask for ahead of time holds up loads that
#: are waited for. Measured on an H200: 3 to 4 percent of a step.
UNDISTURBED = frozenset({"attention_wide"})
#: Launches named when a wait fails.
NAMED = 8

Variant = tuple[str, str, tuple[tuple[str, "Constant"], ...]]


def _driver() -> Any:
    """NVIDIA's binding, initialised. Raises `UnsupportedError` that says what to install."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(f"CUDA needs NVIDIA's Python binding ({error}): {INSTALL}") from error
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # the binding's own class where the library is missing
        raise UnsupportedError(f"no NVIDIA driver was found ({error}): install the GPU's driver") from error
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise UnsupportedError("the NVIDIA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if code != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"the NVIDIA driver does not start ({code.name}): check nvidia-smi")
    return driver


@cache
def _functions(ordinal: int) -> dict[Variant, tuple[Any, Entry]]:
    """Compiled kernels of a GPU. Engines of a process share them, as they share its context: neither is given back."""
    return {}


@cache
def _unit(family: str) -> Unit:
    return Library(source(family), name=f"{family}.metal", defines={"MINFER_CUDA": "1"}).unit


class CudaBuffer:
    """Memory of the GPU, given back when nothing refers to it."""

    __slots__ = ("_device", "address", "label", "nbytes")

    def __init__(self, device: CudaDevice, address: int, nbytes: int, label: str) -> None:
        self._device, self.address, self.nbytes, self.label = device, address, nbytes, label

    def __del__(self) -> None:
        self._device.release(self.address)


class Call:
    """A launch as the driver takes it: the function, the grid, and an array of pointers to its arguments."""

    __slots__ = ("family", "function", "grid", "keep", "label", "params", "shared", "threads")

    def __init__(self, step: Step, function: Any, slots: Entry) -> None:
        launch = step.launch
        values: dict[int, Any] = {b.slot: ctypes.c_uint64(b.buffer.address + b.offset) for b in step.bound}
        values[0] = (ctypes.c_char * len(launch.args)).from_buffer_copy(launch.args)
        unbound = ctypes.c_uint64(0)  # an optional argument that the constants leave out
        arguments: list[Any] = [values.get(slot, unbound) for slot in slots.buffers]
        arguments += [ctypes.c_uint32(0) for _ in slots.threadgroup]  # where its memory begins
        self.params = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self.keep = (arguments, step)
        self.function, self.grid, self.threads = function, launch.grid, launch.threads
        self.family = launch.family
        self.shared = launch.threadgroup_bytes
        self.label = f"{launch.node} ({launch.kernel})"


class CudaRecording:
    """An instantiated CUDA graph."""

    def __init__(self, device: CudaDevice, steps: Sequence[Step]) -> None:
        self._device = device
        self._calls = device.calls(steps)
        graph = device.call("cuGraphCreate", 0)
        try:
            self._exec = self._instantiate(graph, steps)
        except DeviceMemoryError:
            device.driver.cuGraphDestroy(graph)
            raise
        self._key = device.keep_graph(self._exec, graph)
        device.call("cuGraphUpload", self._exec, device.stream)

    def _instantiate(self, graph: Any, steps: Sequence[Step]) -> Any:
        device, driver, call = self._device, self._device.driver, self._device.call
        nodes: list[Any] = []
        programmatic = driver.CUgraphEdgeData()
        programmatic.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        programmatic.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        add_edges = (
            "cuGraphAddDependencies_v2" if hasattr(driver, "cuGraphAddDependencies_v2") else "cuGraphAddDependencies"
        )
        for c, after in zip(self._calls, hazards([s.launch for s in steps]), strict=True):
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.func = c.function
            params.gridDimX, params.gridDimY, params.gridDimZ = c.grid
            params.blockDimX, params.blockDimY, params.blockDimZ = c.threads, 1, 1
            params.sharedMemBytes = c.shared
            params.kernelParams = ctypes.addressof(c.params)
            # A kernel waits for one kernel before it by itself (msl_cuda::chain); several are waited for in full.
            chained = device.programmatic and len(after) == 1 and self._calls[after[0]].family not in UNDISTURBED
            before = [] if chained else [nodes[i] for i in after]
            node = call("cuGraphAddKernelNode", graph, before, len(before), params)
            if chained:
                call(add_edges, graph, [nodes[after[0]]], [node], [programmatic], 1)
            nodes.append(node)
        return call("cuGraphInstantiate", graph, 0)

    def run(self) -> None:
        self._device.check()
        self._device.call("cuGraphLaunch", self._exec, self._device.stream)
        self._device.submitted(self._calls)

    def __del__(self) -> None:
        if hasattr(self, "_key"):
            self._device.release_graph(self._key)


class CudaDevice(Device):
    """The first GPU that CUDA shows (CUDA_VISIBLE_DEVICES chooses).

    Raises `UnsupportedError` with what to install where there is no binding, driver, GPU or NVRTC, or one too old.
    """

    runs_ahead = True
    chains = True

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.driver = _driver()
        self._timeout_s = timeout_s
        self._dead = ""
        self._last: list[str] = []
        version = self.call("cuDriverGetVersion")
        self.driver_version = (version // 1000, version % 1000 // 10)
        if self.driver_version < LEAST_DRIVER:
            raise UnsupportedError(
                f"the NVIDIA driver supports CUDA {_dotted(self.driver_version)}; minfer needs {_dotted(LEAST_DRIVER)} "
                "or later: update the driver"
            )
        self._ordinal = self.call("cuDeviceGet", 0)
        self.gpu = self.call("cuDeviceGetName", 128, self._ordinal).split(b"\0")[0].decode()
        capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        if capability < LEAST_CAPABILITY:
            raise UnsupportedError(
                f"{self.gpu} has compute capability {_dotted(capability)}; minfer's kernels need "
                f"{_dotted(LEAST_CAPABILITY)} (Ampere) or later"
            )
        self._arch = f"sm_{capability[0]}{capability[1]}"
        self.programmatic = capability >= (9, 0)
        try:
            nvrtc.version()
        except ToolError as error:
            raise UnsupportedError(f"CUDA kernels are compiled by NVRTC: {error} ({INSTALL} brings it)") from error
        # The process's own context, which others may use too; it is kept, as making one takes long.
        try:
            self._context = self.call("cuDevicePrimaryCtxRetain", self._ordinal)
        except (DeviceError, DeviceMemoryError) as error:
            raise UnsupportedError(f"the GPU cannot be used now: {error}; nvidia-smi says by whom it is") from error
        self._functions = _functions(int(self._ordinal))
        self.call("cuCtxSetCurrent", self._context)
        self.stream = self.call("cuStreamCreate", int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._staging = int(self.call("cuMemHostAlloc", STAGING, 0))
        self._pinned = np.ctypeslib.as_array((ctypes.c_uint8 * STAGING).from_address(self._staging))
        self._staged = 0
        self._fetches = Fetches(self)
        self._memory: set[int] = set()
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._closed = False
        self.profile = Profile(
            "cuda",
            unified_memory=False,
            max_threads=self._attribute("MAX_THREADS_PER_BLOCK"),
            max_threadgroup_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            max_buffer_bytes=1 << 40,
            off=tiers_off(),
            extra=frozenset(EXTRA),
            whole_rows=WHOLE_ROWS,
            split_rows=SPLIT_ROWS,
            max_splits=MAX_SPLITS,
            cores=self._attribute("MULTIPROCESSOR_COUNT"),
        )

    # --- the driver ----------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        """A driver call's result. Raises `DeviceMemoryError`, after which all goes on, and `DeviceError`: an error that
        is not the caller's fault ends the device."""
        code, *out = getattr(self.driver, name)(*args)
        if code == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceMemoryError(f"{self.gpu} has no memory left for {name}: end what else uses it, or ask for less")
        if code != self.driver.CUresult.CUDA_SUCCESS:
            self._dead = self._dead or f"{name}: {self._words(code)}{self._named()}"
            raise DeviceError(f"the GPU stopped: {self._dead}")
        return out[0] if len(out) == 1 else tuple(out)

    def _words(self, code: Any) -> str:
        text = self.driver.cuGetErrorString(code)[1]
        return f"{code.name} ({text.decode() if isinstance(text, bytes) else text})"

    def _named(self) -> str:
        return f"; the last launches were {', '.join(self._last)}" if self._last else ""

    def _attribute(self, name: str) -> int:
        key = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", key, self._ordinal))

    def check(self) -> None:
        """Raise what ended the device; make its context this thread's."""
        if self._dead:
            raise DeviceError(f"the GPU is no longer used and must be opened anew: {self._dead}")
        self.call("cuCtxSetCurrent", self._context)

    def facts(self) -> dict[str, str]:
        return {
            "GPU": self.gpu,
            "architecture": self._arch,
            "driver's CUDA": _dotted(self.driver_version),
            "NVRTC": _dotted(nvrtc.version()),
        }

    # --- memory --------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int, label: str) -> CudaBuffer:
        self.check()
        size = max(nbytes, 16)
        code, address = self.driver.cuMemAlloc(size)
        if code == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.call("cuMemGetInfo")
            raise DeviceMemoryError(
                f"{label}: {nbytes:,} bytes asked for, {free:,} of {total:,} bytes free on {self.gpu}"
            )
        if code != self.driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{label}: {nbytes:,} bytes cannot be allocated: {self._words(code)}")
        made = CudaBuffer(self, int(address), nbytes, label)
        self._memory.add(made.address)
        self.call("cuMemsetD8Async", made.address, 0, size, self.stream)
        return made

    def release(self, address: int) -> None:
        """Give memory back, on any thread: the collector runs on all of them. After a fault nothing is: the driver
        would wait for what does not end."""
        if address in self._memory and not self._dead:
            self.driver.cuCtxSetCurrent(self._context)
            self._memory.remove(address)
            self.driver.cuMemFree(address)

    def keep_graph(self, executable: Any, graph: Any) -> int:
        key = int(executable)
        self._graphs[key] = executable, graph
        return key

    def release_graph(self, key: int) -> None:
        """Drop a graph; a run of it that is under way ends first."""
        if key in self._graphs and not self._dead:
            self.driver.cuCtxSetCurrent(self._context)
            executable, graph = self._graphs.pop(key)
            self.driver.cuGraphExecDestroy(executable)
            self.driver.cuGraphDestroy(graph)

    def wrap(self, address: int, nbytes: int, keep: object, label: str) -> tuple[CudaBuffer, int]:
        raise UnsupportedError(f"{label}: {self.gpu} does not read the host's memory in place")

    def _stage(self, nbytes: int) -> int:
        """Where `nbytes` of the staging memory begin that no submitted copy uses; at most half of it at a time."""
        if self._staged + nbytes > STAGING:
            self._finish()
        at = self._staged
        self._staged += -(-nbytes // 256) * 256
        return at

    def write(self, buffer: CudaBuffer, offset: int, data: bytes | memoryview) -> None:
        self.check()
        raw = np.frombuffer(data, np.uint8)
        for start in range(0, len(raw), STAGING // 2):
            part = raw[start : start + STAGING // 2]
            at = self._stage(len(part))
            self._pinned[at : at + len(part)] = part
            target = buffer.address + offset + start
            self.call("cuMemcpyHtoDAsync", target, self._staging + at, len(part), self.stream)

    def read(self, buffer: CudaBuffer, offset: int, nbytes: int) -> bytes:
        self.check()
        out = bytearray()
        while len(out) < nbytes:
            size = min(nbytes - len(out), STAGING // 2)
            at = self._stage(size)
            begin = buffer.address + offset + len(out)
            self.call("cuMemcpyDtoHAsync", self._staging + at, begin, size, self.stream)
            self._finish()
            out += self._pinned[at : at + size].tobytes()
        return bytes(out)

    def fetch(self, buffer: CudaBuffer, offset: int, nbytes: int) -> Fetch:
        self.check()
        return self._fetches.start(buffer.address + offset, nbytes)

    def copy(self, source: CudaBuffer, source_offset: int, target: CudaBuffer, target_offset: int, nbytes: int) -> None:
        self.check()
        self.call(
            "cuMemcpyDtoDAsync", target.address + target_offset, source.address + source_offset, nbytes, self.stream
        )

    def memory(self) -> tuple[int, int] | None:
        self.check()
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    # --- launches ------------------------------------------------------------------------------------------------

    def calls(self, steps: Sequence[Step]) -> list[Call]:
        """Launches with their functions; those that are new are compiled, the families side by side."""
        self.prepare([step.launch for step in steps])
        found = [self._functions[s.launch.family, s.launch.kernel, s.launch.constants] for s in steps]
        return [Call(step, *function) for step, function in zip(steps, found, strict=True)]

    def prepare(self, launches: Sequence[Launch]) -> int:
        self.check()
        wanted: dict[str, list[Variant]] = {}
        for variant in dict.fromkeys((v.family, v.kernel, v.constants) for v in launches):
            if variant not in self._functions:
                wanted.setdefault(variant[0], []).append(variant)
        parts = [some[i : i + CHUNK] for some in wanted.values() for i in range(0, len(some), CHUNK)]
        with ThreadPoolExecutor(max(1, min(len(parts), os.cpu_count() or 1))) as pool:
            built = list(pool.map(self._compile, parts))
        for part, module in zip(parts, built, strict=True):
            loaded = self.call("cuModuleLoadData", module.cubin)
            for variant in part:
                symbol, slots = module.entries[variant[1], tuple(sorted(variant[2]))]
                function = self.call("cuModuleGetFunction", loaded, symbol.encode())
                if slots.threadgroup:  # more than every GPU has must be asked for
                    limit = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    self.call("cuFuncSetAttribute", function, limit, self.profile.max_threadgroup_bytes)
                self._functions[variant] = function, slots
        return sum(map(len, parts))

    def _compile(self, variants: Sequence[Variant]) -> nvrtc.Module:
        family = variants[0][0]
        try:
            wanted = [(kernel, dict(constants)) for _, kernel, constants in variants]
            return nvrtc.module(_unit(family), wanted, self._arch)
        except MslError as error:
            raise UnsupportedError(f"{family}.metal does not compile for {self.gpu} ({self._arch}): {error}") from error

    def _launch(self, c: Call) -> None:
        params = ctypes.addressof(c.params)
        self.call("cuLaunchKernel", c.function, *c.grid, c.threads, 1, 1, c.shared, self.stream, params, 0)

    def encode(self, steps: Sequence[Step]) -> None:
        calls = self.calls(steps)
        for c in calls:
            self._launch(c)
        self.submitted(calls)

    def times(self, steps: Sequence[Step]) -> list[float]:
        calls = self.calls(steps)
        events = [self.call("cuEventCreate", 0) for _ in range(len(calls) + 1)]
        self.call("cuEventRecord", events[0], self.stream)
        for c, event in zip(calls, events[1:], strict=True):
            self._launch(c)
            self.call("cuEventRecord", event, self.stream)
        self.submitted(calls)
        self._finish()
        found = [self.call("cuEventElapsedTime", a, b) / 1000 for a, b in itertools.pairwise(events)]
        for event in events:
            self.call("cuEventDestroy", event)
        return found

    def record(self, steps: Sequence[Step]) -> CudaRecording:
        return CudaRecording(self, steps)

    def submitted(self, calls: Sequence[Call]) -> None:
        """Remember what to name if the next wait fails."""
        self._last = [c.label for c in calls[-NAMED:]]

    def synchronize(self) -> None:
        self.check()
        self._finish()

    def _finish(self) -> None:
        """Wait until the stream is empty; the staging memory is free then."""
        self.wait("cuStreamQuery", self.stream)
        self._staged = 0

    def wait(self, query: str, what: Any) -> None:
        """Ask, for a bounded time, until the driver says that a stream is empty or an event has come."""
        pending, success = self.driver.CUresult.CUDA_ERROR_NOT_READY, self.driver.CUresult.CUDA_SUCCESS
        start = time.monotonic()
        while True:
            (code,) = getattr(self.driver, query)(what)
            if code == success:
                return
            if code != pending:
                self._dead = f"{self._words(code)}{self._named()}"
                raise DeviceError(f"the GPU stopped: {self._dead}")
            waited = time.monotonic() - start
            if waited > self._timeout_s:
                self._dead = f"no end within {self._timeout_s:g} s{self._named()}"
                raise DeviceError(f"the GPU stopped: {self._dead}")
            if waited > SPIN_S:
                time.sleep(0.0001)

    def close(self) -> None:
        """Give everything back; after a fault the process must end for that."""
        if self._closed or self._dead:
            return
        self.call("cuCtxSetCurrent", self._context)
        self._finish()
        self._closed = True
        for key in list(self._graphs):
            self.release_graph(key)
        for address in list(self._memory):
            self.release(address)
        self._fetches.close()
        self.driver.cuMemFreeHost(self._staging)
        self.driver.cuStreamDestroy(self.stream)
        self._dead = "it was closed"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            with contextlib.suppress(DeviceError, DeviceMemoryError):
                self.close()


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
