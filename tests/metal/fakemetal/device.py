"""The GPU, and its residency sets."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.kernels import FAMILIES, source
from minfer.msl.errors import MslError, SourceError
from minfer.msl.library import Library as SoftwareLibrary

from .commands import IndirectCommandBuffer, Queue, SharedEvent
from .objects import PAGE, POISON, Buffer, CounterSampleBuffer, CounterSet, Error, Function, Library, Pipeline
from .runtime import Instance, MTLSize, Runtime

if TYPE_CHECKING:
    from .runtime import Proxy


class Device(Instance):
    owner = "MTLDevice"
    shared = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._sets = [CounterSet(runtime, name) for name in ("stageutilization", "timestamp")]

    def name(self) -> str:
        return self.runtime.name

    def registryID(self) -> int:
        return 4294968325

    def hasUnifiedMemory(self) -> bool:
        return self.runtime.unified

    def maxBufferLength(self) -> int:
        return 1 << 35

    def maxThreadgroupMemoryLength(self) -> int:
        return 32768

    def maxThreadsPerThreadgroup(self) -> MTLSize:
        return MTLSize(1024, 1024, 1024)

    def recommendedMaxWorkingSetSize(self) -> int:
        return self.runtime.faults.memory

    def currentAllocatedSize(self) -> int:
        return self.runtime.allocated

    def supportsFamily_(self, family: int) -> bool:
        if 1001 <= family <= 1010:
            return family <= self.runtime.family
        return family in (2002, 3001, 3002, 3003) or (family == 5001 and self.runtime.metal3)

    def supportsCounterSampling_(self, point: int) -> bool:
        return point == 0 and not self.runtime.faults.no_sampling

    def counterSets(self) -> list[CounterSet] | None:
        return None if self.runtime.faults.no_counters else self._sets

    def sampleTimestamps_gpuTimestamp_(self) -> tuple[int, int]:
        return int(1e9 * self.runtime.time), self.runtime.ticks()

    def newCounterSampleBufferWithDescriptor_error_(
        self, descriptor: Proxy
    ) -> tuple[CounterSampleBuffer | None, Error | None]:
        values = descriptor.instance.values
        if values.get("storageMode") != 0 or values["counterSet"].instance.name() != "timestamp":
            raise self.runtime.fail(f"a sample buffer made with {values}")
        count = values["sampleCount"]
        if not 0 < count <= 4096 or self.runtime.faults.no_sample_buffer:
            return None, Error(self.runtime, "MTLCounterErrorDomain", 0, f"no room for {count} samples")
        return CounterSampleBuffer(self.runtime, count), None

    def newCommandQueue(self) -> Queue:
        return Queue(self.runtime)

    def newSharedEvent(self) -> SharedEvent:
        return SharedEvent(self.runtime)

    def newBufferWithLength_options_(self, length: int, options: int) -> Buffer | None:
        if options & 0xF0:
            raise self.runtime.fail("minfer's buffers are shared: their memory is read and written by the host")
        if length == 0 or length > self.maxBufferLength():
            raise self.runtime.fail(f"a buffer of {length} bytes is refused by Metal's validation")
        if self.runtime.allocated + length > self.runtime.faults.memory:
            return None
        made = self.runtime.software.buffer(length)
        if self.runtime.faults.dirty_memory:
            made.contents()[:] = bytes([POISON]) * length
        return Buffer(self.runtime, made, counted=True)

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, memory: Any, length: int, options: int, deallocator: object
    ) -> Buffer | None:
        if isinstance(memory, (bytes, str)):
            raise self.runtime.fail("bytes where an address is wanted: Metal would keep a pointer into a Python object")
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if length % PAGE or address % mmap.PAGESIZE:
            raise self.runtime.fail(f"no-copy memory at {address:#x} of {length} bytes is not whole pages")
        if self.runtime.faults.no_mapping:
            return None
        if self.runtime.faults.copies_mapping:
            return Buffer(self.runtime, self.runtime.software.buffer(ctypes.string_at(address, length)), counted=False)
        software = self.runtime.software.buffer_no_copy(address, length)
        return Buffer(self.runtime, software, counted=False)

    def newLibraryWithSource_options_error_(
        self, text: str, options: Proxy | None
    ) -> tuple[Library | None, Error | None]:
        values = options.instance.values if options is not None else {}
        safe = values.get("mathMode") == 0 or values.get("fastMathEnabled") is False
        if not safe or values.get("languageVersion") != 196609:
            raise self.runtime.fail(f"kernels are compiled without fast math, as MSL 3.1; found {values}")
        text = self.runtime.faults.broken_source + text
        try:
            family = next((f for f in FAMILIES if source(f) == text), None)
            library = simulator.library(family) if family else SoftwareLibrary(text, name="program_source")
        except SourceError as error:
            return None, Error(
                self.runtime, "MTLLibraryErrorDomain", 3, f"program_source:{error.line}:1: error: {error.reason}\n"
            )
        return Library(self.runtime, library), None

    def newComputePipelineStateWithDescriptor_options_reflection_error_(
        self, descriptor: Proxy, options: int, reflection: None
    ) -> tuple[Pipeline | None, Error | None]:
        values = descriptor.instance.values
        function: Function = values["computeFunction"].instance
        function.check_alive()
        indirect = bool(values.get("supportIndirectCommandBuffers"))
        if self.runtime.faults.pipeline:
            return None, Error(self.runtime, "AGXMetalG15X", 3, self.runtime.faults.pipeline)
        try:
            software = self.runtime.software.pipeline(
                function.library,
                function.name_,
                function.constants,
                support_indirect_command_buffers=indirect,
                build=False,
            )
        except MslError as error:
            return None, Error(self.runtime, "CompilerError", 2, str(error))
        return Pipeline(self.runtime, software), None

    def newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(
        self, descriptor: Proxy, count: int, options: int
    ) -> IndirectCommandBuffer | None:
        values = descriptor.instance.values
        wanted = {"commandTypes": 32, "inheritBuffers": False, "inheritPipelineState": False}
        if any(values.get(key) != value for key, value in wanted.items()) or options & 0xF0:
            raise self.runtime.fail(f"an indirect command buffer made with {values}")
        if not 0 < count <= 16384:
            raise self.runtime.fail(f"an indirect command buffer of {count} commands")
        return IndirectCommandBuffer(self.runtime, count, values["maxKernelBufferBindCount"])

    def newResidencySetWithDescriptor_error_(self, descriptor: Proxy) -> tuple[ResidencySet | None, Error | None]:
        if self.runtime.faults.no_residency:
            return None, Error(self.runtime, "MTLDeviceError", 1, "no residency sets on this GPU")
        return ResidencySet(self.runtime), None


class ResidencySet(Instance):
    owner = "MTLResidencySet"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.members: list[Instance] = []
        self.committed: list[Instance] = []

    def addAllocation_(self, allocation: Proxy) -> None:
        self.members.append(allocation.instance.retain())

    def removeAllAllocations(self) -> None:
        for member in self.members:
            member.release()
        self.members = []

    def commit(self) -> None:
        self.committed = list(self.members)

    def requestResidency(self) -> None:
        pass

    def endResidency(self) -> None:
        pass

    def dealloc(self) -> None:
        self.removeAllAllocations()
