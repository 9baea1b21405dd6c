"""NVIDIA's driver binding, pretended: memory of the host, and kernels that run on the software device.

Only what `devices/cuda.py` calls is there, with the binding's names, arguments and results. An address outside an
allocation, a kernel argument that points nowhere, or a graph edge that is missing (nodes run in a shuffled order that
respects the edges) is an error here as there.
"""

from __future__ import annotations

import ctypes
import enum
import json
import random
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minfer.backends.gpu.args import STRUCTS
from minfer.backends.gpu.devices import simulator
from minfer.msl import nvrtc
from minfer.msl.device import Device as SoftwareDevice
from minfer.msl.emit_cuda import entry
from minfer.msl.recording import Bound, Launch, Recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

#: Calls that need no current context.
NO_CONTEXT = {
    "cuInit",
    "cuGetErrorString",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
}
Result = enum.Enum(
    "CUresult",
    [
        ("CUDA_SUCCESS", 0),
        ("CUDA_ERROR_INVALID_VALUE", 1),
        ("CUDA_ERROR_OUT_OF_MEMORY", 2),
        ("CUDA_ERROR_INVALID_CONTEXT", 201),
        ("CUDA_ERROR_NO_DEVICE", 100),
        ("CUDA_ERROR_NOT_READY", 600),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", 700),
        ("CUDA_ERROR_SYSTEM_NOT_READY", 802),
    ],
)
OK = Result.CUDA_SUCCESS
ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 32768,  # what the software device has
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 2,
}


@dataclass
class Function:
    """A kernel of a loaded module."""

    family: str
    name: str
    constants: dict[str, Any]
    shared: int = 0  # dynamic memory that it may take


@dataclass
class Node:
    work: Launch
    after: list[Node] = field(default_factory=list)


@dataclass
class FakeCuda:
    """The state of the pretended machine, and its knobs: `capacity` bytes of memory, `fault` the result that every call
    gives after the next launch, `hangs` whether launches never end, `full` the call for which there is no memory."""

    capacity: int = 1 << 30
    version: int = 13000
    attributes: dict[str, int] = field(default_factory=lambda: dict(ATTRIBUTES))
    fault: Any = None
    hangs: bool = False
    start: Any = OK
    broken: Any = OK
    full: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        self.device = SoftwareDevice()
        self.memory: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.live: set[str] = set()
        self.calls: list[str] = []
        self.launched: list[str] = []
        self.graphs = self.running = 0
        self.random = random.Random(self.seed)
        self.thread = threading.local()  # which context is current is a thread's own

    # --- what stands behind the calls ----------------------------------------------------------------------------

    def find(self, address: int, nbytes: int) -> tuple[Any, int]:
        for start, buffer in self.memory.items():
            if start <= address and address + nbytes <= start + buffer.length:
                return buffer, address - start
        raise IndexError(f"{nbytes} bytes at {address:#x} are in no allocation")

    def launch(self, function: Function, grid: tuple[int, ...], threads: int, params: int, shared: int) -> Launch:
        """What a launch says when it is made: the arguments are read here, as the driver copies them."""
        library = simulator.library(function.family)
        instance = library.unit.instances[function.name]
        slots = entry(instance.kernel)
        pointers = (ctypes.c_void_p * (len(slots.buffers) + len(slots.threadgroup))).from_address(params)
        offsets = [ctypes.c_uint32.from_address(p).value for p in pointers[len(slots.buffers) :]]
        assert offsets == [0] * bool(shared)
        assert shared <= function.shared
        buffers = {}
        for slot, pointer in zip(slots.buffers, pointers, strict=False):
            if slot in slots.values:
                (param,) = [p for p in instance.kernel.params if p.kind == "buffer" and p.index == slot]
                tokens = library.unit.tokens[param.decl[0] : param.type_end]
                (name,) = [token.text for token in tokens if token.text in STRUCTS]
                raw = ctypes.string_at(pointer, STRUCTS[name].nbytes)
                buffers[slot] = Bound(self.device.buffer(raw, label=name))
            elif address := ctypes.c_uint64.from_address(pointer).value:
                buffer, offset = self.find(address, 1)
                buffers[slot] = Bound(buffer, offset)
        kernel = library.kernel(function.name, function.constants)
        whole = (grid[0] * threads, grid[1], grid[2])
        memory = {0: shared} if shared else {}
        return Launch(kernel, whole, (threads, 1, 1), buffers, memory, label=function.name)

    def run(self, launches: Sequence[Launch]) -> None:
        self.launched += [launch.label for launch in launches]
        if self.fault:
            self.broken, self.fault = self.fault, None
        if self.broken is OK and not self.hangs:
            Recording(launches).run(self.device.run)
        self.running += self.hangs

    def module(self, unit: Any, wanted: Sequence[tuple[str, Mapping[str, Any]]], arch: str) -> nvrtc.Module:
        """Stands for NVRTC: a cubin that says which kernels are in it."""
        entries, names = {}, {}
        for name, constants in wanted:
            symbol = f"k{len(names)}"
            family = unit.instances[name].kernel.file.removesuffix(".metal")
            names[symbol] = [family, name, dict(constants)]
            key = (name, tuple(sorted(constants.items())))
            entries[key] = symbol, entry(unit.instances[name].kernel)
        return nvrtc.Module(arch, json.dumps(names).encode(), entries)

    # --- the binding ---------------------------------------------------------------------------------------------

    def binding(self) -> types.SimpleNamespace:
        kinds = [("CU_GRAPH_DEPENDENCY_TYPE_DEFAULT", 0), ("CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC", 1)]
        return types.SimpleNamespace(
            CUresult=Result,
            CUdevice_attribute=enum.Enum("CUdevice_attribute", list(self.attributes)),
            CUfunction_attribute=enum.Enum("CUfunction_attribute", ["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"]),
            CUstream_flags=enum.IntEnum("CUstream_flags", [("CU_STREAM_NON_BLOCKING", 1)]),
            CUevent_flags=enum.IntEnum("CUevent_flags", [("CU_EVENT_DISABLE_TIMING", 2)]),
            CUgraphDependencyType=enum.IntEnum("CUgraphDependencyType", kinds),
            CUgraphEdgeData=types.SimpleNamespace,
            CUDA_KERNEL_NODE_PARAMS=types.SimpleNamespace,
            **{name: self._called(name) for name in dir(self) if name.startswith("cu")},
        )

    def _called(self, name: str) -> Any:
        function = getattr(self, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if self.broken is not OK and name not in ("cuInit", "cuGetErrorString"):
                return (self.broken, *[None] * 1)
            try:
                if name not in NO_CONTEXT and getattr(self.thread, "context", None) is None:
                    out = Result.CUDA_ERROR_INVALID_CONTEXT
                else:
                    out = Result.CUDA_ERROR_OUT_OF_MEMORY if name == self.full else function(*args)
            except IndexError:
                self.broken = Result.CUDA_ERROR_ILLEGAL_ADDRESS
                return (self.broken,)
            if isinstance(out, Result):
                return (out, None) if name == "cuMemAlloc" else (out,)
            return (OK,) if out is None else (OK, *(out if isinstance(out, tuple) else (out,)))

        return call

    def cuInit(self, flags: int) -> Any:
        return self.start

    def cuGetErrorString(self, error: Any) -> bytes:
        return {700: b"an illegal memory access was encountered"}.get(error.value, b"words")

    def cuDriverGetVersion(self) -> int:
        return self.version

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetName(self, length: int, dev: int) -> bytes:
        return b"Pretended GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attrib: Any, dev: int) -> int:
        return self.attributes[attrib.name]

    def cuDevicePrimaryCtxRetain(self, dev: int) -> str:
        return "context"

    def cuCtxSetCurrent(self, ctx: str) -> None:
        assert ctx == "context"
        self.thread.context = ctx

    def cuStreamCreate(self, Flags: int) -> str:
        self.live.add(f"stream {len(self.calls)}")
        return f"stream {len(self.calls)}"

    def cuStreamDestroy(self, hStream: str) -> None:
        self.live.remove(hStream)

    def cuStreamQuery(self, hStream: str) -> Any:
        return Result.CUDA_ERROR_NOT_READY if self.running else None

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        memory = (ctypes.c_char * bytesize)()
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cuMemFreeHost(self, p: int) -> None:
        del self.pinned[p]

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.capacity - sum(b.length for b in self.memory.values()), self.capacity

    def cuMemAlloc(self, bytesize: int) -> Any:
        if bytesize > self.cuMemGetInfo()[0]:
            return Result.CUDA_ERROR_OUT_OF_MEMORY
        buffer = self.device.buffer(bytesize)
        self.memory[buffer.address] = buffer
        return buffer.address

    def cuMemFree(self, dptr: int) -> None:
        del self.memory[dptr]

    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: str) -> None:
        buffer, at = self.find(dstDevice, N)
        buffer.write(bytes([uc]) * N, at)

    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: str) -> None:
        buffer, at = self.find(dstDevice, ByteCount)
        self._host(srcHost, ByteCount)
        buffer.write(ctypes.string_at(srcHost, ByteCount), at)

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: str) -> None:
        buffer, at = self.find(srcDevice, ByteCount)
        self._host(dstHost, ByteCount)
        ctypes.memmove(dstHost, buffer.read(at, ByteCount), ByteCount)

    def _host(self, address: int, nbytes: int) -> None:
        """An asynchronous copy takes pinned memory."""
        if not any(a <= address and address + nbytes <= a + len(m) for a, m in self.pinned.items()):
            raise IndexError("not pinned")

    def cuMemcpyDtoDAsync(self, dstDevice: int, srcDevice: int, ByteCount: int, hStream: str) -> None:
        (to, to_at), (of, of_at) = self.find(dstDevice, ByteCount), self.find(srcDevice, ByteCount)
        to.write(of.read(of_at, ByteCount), to_at)

    def cuModuleLoadData(self, image: bytes) -> dict[str, Function]:
        return {symbol: Function(*what) for symbol, what in json.loads(image).items()}

    def cuModuleGetFunction(self, hmod: dict[str, Function], name: bytes) -> Function:
        return hmod[name.decode()]

    def cuFuncSetAttribute(self, hfunc: Function, attrib: Any, value: int) -> None:
        assert attrib.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        hfunc.shared = value

    def cuLaunchKernel(
        self,
        f: Any,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        shared: int,
        stream: str,
        params: int,
        extra: int,
    ) -> None:
        assert (by, bz, extra) == (1, 1, 0)
        self.run([self.launch(f, (gx, gy, gz), bx, params, shared)])

    def cuEventCreate(self, Flags: int) -> list[int]:
        self.live.add(f"event {len(self.calls)}")
        return [len(self.calls)]

    def cuEventRecord(self, hEvent: list[int], hStream: str) -> None:
        hEvent.append(len(self.launched))

    def cuEventQuery(self, hEvent: list[int]) -> Any:
        assert len(hEvent) > 1, "an event that was never recorded"
        return Result.CUDA_ERROR_NOT_READY if self.running else None

    def cuEventElapsedTime(self, hStart: list[int], hEnd: list[int]) -> float:
        return float(hEnd[1] - hStart[1])  # a millisecond a launch

    def cuEventDestroy(self, hEvent: list[int]) -> None:
        self.live.remove(f"event {hEvent[0]}")

    def cuGraphCreate(self, flags: int) -> list[Node]:
        self.graphs += 1
        return []

    def cuGraphAddKernelNode(self, hGraph: list[Node], dependencies: Any, numDependencies: int, nodeParams: Any) -> Any:
        p = nodeParams
        assert len(dependencies) == numDependencies
        assert (p.blockDimY, p.blockDimZ) == (1, 1)
        grid = (p.gridDimX, p.gridDimY, p.gridDimZ)
        node = Node(self.launch(p.func, grid, p.blockDimX, p.kernelParams, p.sharedMemBytes), list(dependencies))
        hGraph.append(node)
        return (node,)

    def cuGraphAddDependencies(self, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: int) -> None:
        assert len(from_) == len(to) == len(edgeData) == numDependencies
        for a, b, edge in zip(from_, to, edgeData, strict=True):
            assert (edge.from_port, edge.type) == (1, 1)
            b.after.append(a)

    def cuGraphInstantiate(self, hGraph: list[Node], flags: int) -> Any:
        return (Executable(list(hGraph)),)

    def cuGraphUpload(self, hGraphExec: Any, hStream: str) -> None:
        pass

    def cuGraphLaunch(self, hGraphExec: Any, hStream: str) -> None:
        waiting, order = list(hGraphExec.nodes), []
        done: set[int] = set()
        while waiting:
            ready = [n for n in waiting if all(id(a) in done for a in n.after)]
            node = self.random.choice(ready)
            waiting.remove(node)
            order.append(node.work)
            done.add(id(node))
        self.run(order)

    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        hGraphExec.nodes.clear()

    def cuGraphDestroy(self, hGraph: Any) -> None:
        self.graphs -= 1


class Executable:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __int__(self) -> int:
        return id(self)


def install(monkeypatch: pytest.MonkeyPatch, machine: FakeCuda) -> None:
    """Put the pretended binding where `from cuda.bindings import driver` finds it, and NVRTC's stand-in."""
    from minfer import backends
    from minfer.backends.gpu.devices import cuda

    driver = machine.binding()
    bindings = types.SimpleNamespace(driver=driver)
    package = types.SimpleNamespace(bindings=bindings)
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "module", machine.module)
    monkeypatch.setattr(backends, "nvidia_driver", lambda: None)
    cuda._functions.cache_clear()
