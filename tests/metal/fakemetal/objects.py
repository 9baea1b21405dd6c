"""Metal's objects over the software Metal device. Method names are selectors spelled the PyObjC way."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.kernels import FAMILIES, source
from minfer.msl.errors import LaunchError, MslError, SourceError
from minfer.msl.library import Library as SoftwareLibrary

from .runtime import Instance, MTLSize, Runtime, VarList

if TYPE_CHECKING:
    import weakref

    from minfer.msl import commands
    from minfer.msl.device import Buffer as SoftwareBuffer

    from .runtime import Proxy

PAGE = 16384
CTYPES = {
    53: ctypes.c_bool,
    29: ctypes.c_int32,
    33: ctypes.c_uint32,
    41: ctypes.c_uint16,
    37: ctypes.c_int16,
    3: ctypes.c_float,
}
TYPE_NAMES = {53: "bool", 29: "int", 33: "uint", 41: "ushort", 37: "short", 3: "float"}
POISON = 0xDB


class Error(Instance):
    owner = "NSError"

    def __init__(self, runtime: Runtime, domain: str, code: int, text: str) -> None:
        super().__init__(runtime)
        self._domain, self._code, self._text = domain, code, text

    def localizedDescription(self) -> str:
        return self._text

    def domain(self) -> str:
        return self._domain

    def code(self) -> int:
        return self._code


class Descriptor(Instance):
    """A class of properties: what was set is what is read."""

    def __init__(self, runtime: Runtime, owner: str) -> None:
        super().__init__(runtime)
        self.owner = owner
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set") and name.endswith("_"):
            return lambda value: self.values.__setitem__(name[3].lower() + name[4:-1], value)
        if name.startswith("_") or name.endswith("_"):
            raise AttributeError(name)
        return lambda: self.values.get(name)


class ConstantValues(Descriptor):
    def __init__(self, runtime: Runtime, owner: str) -> None:
        super().__init__(runtime, owner)
        self.constants: dict[int, tuple[str, Any]] = {}

    def setConstantValue_type_atIndex_(self, address: int, kind: int, index: int) -> None:
        if kind not in CTYPES:
            raise self.runtime.fail(f"function constants of type {kind} are not known to the fake")
        self.constants[index] = (TYPE_NAMES[kind], CTYPES[kind].from_address(address).value)


class Url(Instance):
    owner = "NSURL"

    def __init__(self, runtime: Runtime, path: str) -> None:
        super().__init__(runtime)
        self._path = path

    def path(self) -> str:
        return self._path


class CaptureManager(Instance):
    owner = "MTLCaptureManager"
    shared = True
    capturing = False

    def supportsDestination_(self, destination: int) -> bool:
        return destination == 2 and self.runtime.faults.capture != "destination"

    def startCaptureWithDescriptor_error_(self, descriptor: Proxy) -> tuple[bool, Error | None]:
        values = descriptor.instance.values
        if self.runtime.faults.capture or values.get("captureObject") is None:
            return False, Error(self.runtime, "MTLCaptureError", 3, self.runtime.faults.capture)
        self.capturing = True
        self.runtime.captures.append(values["outputURL"].instance.path())
        return True, None

    def stopCapture(self) -> None:
        if not self.capturing:
            raise self.runtime.fail("stopCapture without a capture")
        self.capturing = False

    def isCapturing(self) -> bool:
        return self.capturing


class Device(Instance):
    owner = "MTLDevice"
    shared = True

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
        return Buffer(self.runtime, self.runtime.software.buffer(length), counted=True)

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


class Buffer(Instance):
    owner = "MTLBuffer"

    def __init__(self, runtime: Runtime, software: SoftwareBuffer, *, counted: bool) -> None:
        super().__init__(runtime)
        self.software, self.counted = software, counted
        self.views: list[weakref.ref[Any]] = []
        runtime.allocated += software.length if counted else 0

    def contents(self) -> VarList:
        return VarList(self)

    def length(self) -> int:
        return int(self.software.length)

    def dealloc(self) -> None:
        if self.counted:
            self.runtime.allocated -= self.software.length
            self.runtime.stale += [(view, self.software) for view in self.views if view() is not None]
            self.software.contents()[:] = bytes([POISON]) * self.software.length


class Library(Instance):
    owner = "MTLLibrary"

    def __init__(self, runtime: Runtime, software: SoftwareLibrary) -> None:
        super().__init__(runtime)
        self.software = software

    def newFunctionWithName_constantValues_error_(
        self, name: str, values: Proxy
    ) -> tuple[Function | None, Error | None]:
        declared = {c.index: c for c in self.software.unit.constants.values()}
        constants: dict[int | str, Any] = {}
        for index, (kind, value) in values.instance.constants.items():
            if index not in declared or declared[index].type != kind:
                found = declared[index].type if index in declared else "nothing"
                return None, Error(self.runtime, "MTLLibraryErrorDomain", 3, f"constant {index} is {found}, not {kind}")
            constants[index] = value
        if name not in self.software.kernel_names:
            return None, Error(
                self.runtime, "MTLLibraryErrorDomain", 5, f"Function {name} was not found in the library"
            )
        return Function(self.runtime, self.software, name, constants), None


class Function(Instance):
    owner = "MTLFunction"

    def __init__(self, runtime: Runtime, library: SoftwareLibrary, name: str, constants: dict[int | str, Any]) -> None:
        super().__init__(runtime)
        self.library, self.name_, self.constants = library, name, constants


class Pipeline(Instance):
    owner = "MTLComputePipelineState"

    def __init__(self, runtime: Runtime, software: Any) -> None:
        super().__init__(runtime)
        self.software = software

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return int(self.software.max_total_threads_per_threadgroup)

    def threadExecutionWidth(self) -> int:
        return 32


class SharedEvent(Instance):
    owner = "MTLSharedEvent"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.software = runtime.software.shared_event()

    def signaledValue(self) -> int:
        self.runtime.drain()
        return int(self.software.signaled_value)

    def waitUntilSignaledValue_timeoutMS_(self, value: int, timeout: int) -> bool:
        if timeout > 600_000:
            raise self.runtime.fail(f"a wait of {timeout} ms is not bounded")
        self.runtime.drain()
        # What has not happened by now never will, so a test need not sit and wait.
        return bool(self.software.wait_until_signaled(value, 0))


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


class Queue(Instance):
    owner = "MTLCommandQueue"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.software = runtime.software.command_queue()
        self.sets: list[Instance] = []

    def commandBuffer(self) -> CommandBuffer | None:
        faults = self.runtime.faults
        if faults.vanish_at and self.runtime.committed + 1 >= faults.vanish_at:
            return None
        return CommandBuffer(self)

    def addResidencySet_(self, residency: Proxy) -> None:
        self.sets.append(residency.instance.retain())

    def removeResidencySet_(self, residency: Proxy) -> None:
        self.sets.remove(residency.instance)
        residency.instance.release()

    def dealloc(self) -> None:
        for residency in self.sets:
            residency.release()
        self.runtime.software.queues.remove(self.software)


class CommandBuffer(Instance):
    owner = "MTLCommandBuffer"

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue.runtime)
        self.software = queue.software.command_buffer()
        self.open: Encoder | None = None
        self.used: list[Instance] = []
        self.signals: tuple[Any, int] | None = None
        self.committed = False
        self.failed: Error | None = None
        self.number = 0
        self.silent = False
        self._late = queue.runtime.faults.late_status

    def use(self, instance: Instance) -> None:
        """Kept until the commands are done."""
        self.used.append(instance.retain())

    def begin(self, encoder: Encoder) -> Encoder:
        if self.committed:
            raise self.runtime.fail("encoding into a committed command buffer")
        if self.open is not None:
            raise self.runtime.fail("a second encoder is opened while one is open")
        self.open = encoder
        return encoder

    def computeCommandEncoder(self) -> Encoder:
        return self.begin(ComputeEncoder(self, concurrent=False))

    def computeCommandEncoderWithDispatchType_(self, kind: int) -> Encoder:
        return self.begin(ComputeEncoder(self, concurrent=kind == 1))

    def blitCommandEncoder(self) -> Encoder:
        return self.begin(BlitEncoder(self))

    def encodeSignalEvent_value_(self, event: Proxy, value: int) -> None:
        if self.open is not None or self.committed:
            raise self.runtime.fail("an event is signaled between encoders, before the commit")
        self.use(event.instance)
        self.signals = (event.instance.software, value)

    def commit(self) -> None:
        if self.open is not None:
            raise self.runtime.fail("commit while an encoder is open")
        if self.committed:
            raise self.runtime.fail("a command buffer is committed twice")
        self.committed = True
        self.runtime.committed += 1
        self.number = self.runtime.committed
        self.runtime.in_flight.append(self.retain())

    def run(self) -> None:
        """What the GPU does, as late as the host can tell: when it asks. Raises where the commands are wrong."""
        runtime, faults = self.runtime, self.runtime.faults
        if self.number == faults.fail_at:
            self.failed = Error(runtime, "MTLCommandBufferErrorDomain", faults.fail_code, faults.fail_text)
            self.failed.shared = True
            self.silent = faults.no_reason
            if faults.fail_signals and self.signals:
                self.signals[0].signaled_value = self.signals[1]
        else:
            if self.signals:
                self.software.encode_signal_event(*self.signals)
            self.software.commit()
            if self.software.error is not None:
                raise runtime.fail(f"the GPU would fault: {self.software.error}") from self.software.error
        for instance in self.used:
            instance.release()
        self.used = []

    def status(self) -> int:
        self.runtime.drain()
        if self.failed:
            return 5
        if not self.committed or self.number == self.runtime.faults.hang_at:
            return 2 if self.committed else 0
        if self._late:
            self._late -= 1
            return 3
        return 4 if self.software.status == "completed" else 3

    def error(self) -> Error | None:
        return None if self.silent else self.failed

    def GPUStartTime(self) -> float:
        return float(self.software.gpu_start_time)

    def GPUEndTime(self) -> float:
        return float(self.software.gpu_end_time)

    def dealloc(self) -> None:
        for instance in self.used:
            instance.release()


class Encoder(Instance):
    def __init__(self, buffer: CommandBuffer) -> None:
        super().__init__(buffer.runtime)
        self.buffer = buffer
        self.ended = False

    def encoding(self) -> None:
        if self.ended:
            raise self.runtime.fail("encoding after endEncoding")

    def endEncoding(self) -> None:
        self.encoding()
        self.ended = True
        self.buffer.open = None
        self.software.end_encoding()  # type: ignore[attr-defined]

    def dealloc(self) -> None:
        if not self.ended:
            raise self.runtime.fail("an encoder was released without endEncoding")


class ComputeEncoder(Encoder):
    owner = "MTLComputeCommandEncoder"

    def __init__(self, buffer: CommandBuffer, *, concurrent: bool) -> None:
        super().__init__(buffer)
        self.software: commands.ComputeEncoder = buffer.software.compute_encoder(concurrent=concurrent)
        self.pipelines: set[int] = set()
        self.pipeline: Pipeline | None = None
        self.resident: set[int] = set()

    def checked(self, call: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            call(*arguments, **keywords)
        except LaunchError as error:
            raise self.runtime.fail(str(error)) from error

    def setComputePipelineState_(self, pipeline: Proxy) -> None:
        self.encoding()
        self.pipeline = pipeline.instance
        self.buffer.use(pipeline.instance)
        self.software.set_pipeline(pipeline.instance.software)

    def setBuffer_offset_atIndex_(self, buffer: Proxy | None, offset: int, index: int) -> None:
        self.encoding()
        if buffer is None:
            self.checked(self.software.set_buffer, None, 0, index)
            return
        self.buffer.use(buffer.instance)
        self.checked(self.software.set_buffer, buffer.instance.software, offset, index)

    def setBuffers_offsets_withRange_(self, buffers: Any, offsets: Any, where: tuple[int, int]) -> None:
        for i in range(where[1]):
            self.setBuffer_offset_atIndex_(buffers[i], offsets[i], where[0] + i)

    def setBytes_length_atIndex_(self, data: Any, length: int, index: int) -> None:
        self.encoding()
        self.checked(self.software.set_bytes, bytes(memoryview(data).cast("B")[:length]), index)

    def memoryBarrierWithScope_(self, scope: int) -> None:
        self.encoding()
        if not scope & 1:
            raise self.runtime.fail("a barrier that does not cover buffers")
        self.software.memory_barrier()

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: Any, threads: Any) -> None:
        self.encoding()
        if self.pipeline is None:
            raise self.runtime.fail("dispatch without a pipeline")
        self.pipelines.add(id(self.pipeline))
        self.checked(self.software.dispatch_threadgroups, tuple(groups), tuple(threads))

    def useResources_count_usage_(self, resources: Any, count: int, usage: int) -> None:
        self.encoding()
        for resource in resources[:count]:
            self.buffer.use(resource.instance)
            self.resident.add(id(resource.instance))
            if isinstance(resource.instance, Buffer):
                self.software.use_resources(resource.instance.software)

    def executeCommandsInBuffer_withRange_(self, commands: Proxy, where: tuple[int, int]) -> None:
        self.encoding()
        recorded: IndirectCommandBuffer = commands.instance
        self.buffer.use(recorded)
        if self.runtime.family < 1009:
            unbound = {id(c.pipeline) for c in recorded.recorded.values()} - self.pipelines
            if unbound:
                raise self.runtime.fail(f"{len(unbound)} pipelines were not bound before the commands that use them")
        for command in recorded.recorded.values():
            for buffer in command.buffers.values():
                buffer.check_alive()
        self.checked(self.software.execute_commands, recorded.software, where[0], where[1])
        if self.runtime.faults.corrupt_replay and len(self.software._launches) > 1:
            self.software._launches.pop()


class BlitEncoder(Encoder):
    owner = "MTLBlitCommandEncoder"

    def __init__(self, buffer: CommandBuffer) -> None:
        super().__init__(buffer)
        self.software = buffer.software.blit_encoder()

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: Proxy, source_offset: int, target: Proxy, target_offset: int, size: int
    ) -> None:
        self.encoding()
        self.buffer.use(source.instance)
        self.buffer.use(target.instance)
        try:
            self.software.copy(source.instance.software, source_offset, target.instance.software, target_offset, size)
        except LaunchError as error:
            raise self.runtime.fail(str(error)) from error


class IndirectCommandBuffer(Instance):
    owner = "MTLIndirectCommandBuffer"

    def __init__(self, runtime: Runtime, count: int, buffers: int) -> None:
        super().__init__(runtime)
        self.software = runtime.software.indirect_command_buffer(count, max_kernel_buffers=buffers)
        self.recorded: dict[int, IndirectCommand] = {}

    def size(self) -> int:
        return len(self.software)

    def indirectComputeCommandAtIndex_(self, index: int) -> IndirectCommand:
        if index >= len(self.software):
            raise self.runtime.fail(f"command {index} of {len(self.software)}")
        self.recorded[index] = IndirectCommand(self.runtime, self.software.command(index))
        return self.recorded[index]


class IndirectCommand(Instance):
    owner = "MTLIndirectComputeCommand"
    shared = True

    def __init__(self, runtime: Runtime, software: commands.IndirectCommand) -> None:
        super().__init__(runtime)
        self.software = software
        self.buffers: dict[int, Buffer] = {}
        self.pipeline: Pipeline | None = None

    def checked(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except LaunchError as error:
            raise self.runtime.fail(str(error)) from error

    def setComputePipelineState_(self, pipeline: Proxy) -> None:
        self.pipeline = pipeline.instance
        self.checked(self.software.set_pipeline, pipeline.instance.software)

    def setKernelBuffer_offset_atIndex_(self, buffer: Proxy, offset: int, index: int) -> None:
        self.buffers[index] = buffer.instance
        self.checked(self.software.set_kernel_buffer, buffer.instance.software, offset, index)

    def setBarrier(self) -> None:
        self.software.set_barrier()

    def concurrentDispatchThreadgroups_threadsPerThreadgroup_(self, groups: Any, threads: Any) -> None:
        if self.pipeline is None:
            raise self.runtime.fail("a recorded dispatch without a pipeline")
        self.checked(self.software.concurrent_dispatch_threadgroups, tuple(groups), tuple(threads))
