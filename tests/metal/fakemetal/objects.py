"""Metal's objects over the software Metal device. Method names are selectors spelled the PyObjC way."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .runtime import Instance, Runtime, VarList

if TYPE_CHECKING:
    import weakref

    from minfer.msl.device import Buffer as SoftwareBuffer
    from minfer.msl.library import Library as SoftwareLibrary

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


class CounterSet(Instance):
    owner = "MTLCounterSet"
    shared = True

    def __init__(self, runtime: Runtime, name: str) -> None:
        super().__init__(runtime)
        self._name = name

    def name(self) -> str:
        return self._name


class CounterSampleBuffer(Instance):
    owner = "MTLCounterSampleBuffer"

    def __init__(self, runtime: Runtime, count: int) -> None:
        super().__init__(runtime)
        self.ticks: list[int | None] = [None] * count


class PassDescriptor(Instance):
    """A compute pass with room for one sample buffer, as most GPUs have."""

    owner = "MTLComputePassDescriptor"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.attachments = Attachments(runtime)

    def sampleBufferAttachments(self) -> Attachments:
        return self.attachments

    def dealloc(self) -> None:
        self.attachments.release()


class Attachments(Instance):
    owner = "MTLComputePassSampleBufferAttachmentDescriptorArray"
    shared = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.first = Attachment(runtime)

    def objectAtIndexedSubscript_(self, index: int) -> Attachment:
        if index:
            raise self.runtime.fail(f"attachment {index} of a compute pass")
        return self.first

    def dealloc(self) -> None:
        self.first.release()


class Attachment(Instance):
    owner = "MTLComputePassSampleBufferAttachmentDescriptor"
    shared = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.samples: CounterSampleBuffer | None = None
        self.start = self.end = 0

    def setSampleBuffer_(self, samples: Proxy) -> None:
        self.samples = samples.instance
        self.samples.retain()

    def setStartOfEncoderSampleIndex_(self, index: int) -> None:
        self.start = index

    def setEndOfEncoderSampleIndex_(self, index: int) -> None:
        self.end = index

    def dealloc(self) -> None:
        if self.samples is not None:
            self.samples.release()


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
