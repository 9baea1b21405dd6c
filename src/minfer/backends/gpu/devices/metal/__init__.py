"""Apple GPUs through PyObjC: the kernels as they are, weights where the file is mapped.

Only this folder touches Objective-C. Direct encoding, one command buffer a list of launches, is the default and the
reference. A recording is an indirect command buffer only where replay has been shown to give the same bits
(`self_test.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minfer.backends.gpu.devices.base import Device, Recording, Step
from minfer.backends.gpu.devices.metal.bridge import compiler_text, error_text, frameworks
from minfer.backends.gpu.devices.metal.capture import Capture
from minfer.backends.gpu.devices.metal.counters import Counters
from minfer.backends.gpu.devices.metal.encode import MAX_COMMANDS, Direct, Replay
from minfer.backends.gpu.kernels import source
from minfer.backends.gpu.lower import Profile
from minfer.backends.gpu.lower.choose import tiers_off
from minfer.errors import DeviceError, DeviceMemoryError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from minfer.backends.base import Check
    from minfer.backends.gpu.launch import Launch

#: A no-copy buffer covers whole pages; 16 KiB on every Apple GPU.
PAGE = max(mmap.PAGESIZE, 16384)
#: An indirect command buffer keeps offsets in 32 bits, so no buffer is longer than they reach.
MAX_BUFFER_BYTES = 1 << 32
#: A wait is made of slices, so that a command buffer that failed without a signal is noticed soon.
WAIT_SLICE_MS = 250
WAIT_S = 60.0
#: Command buffers that may be on their way at once; a queue has room for 64.
MAX_PENDING = 32

_CONSTANT = re.compile(r"constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]")
_CONSTANT_TYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("MTLDataTypeBool", ctypes.c_bool),
    "int": ("MTLDataTypeInt", ctypes.c_int32),
    "uint": ("MTLDataTypeUInt", ctypes.c_uint32),
    "ushort": ("MTLDataTypeUShort", ctypes.c_uint16),
    "float": ("MTLDataTypeFloat", ctypes.c_float),
}

#: Memory of command buffers that never completed: the GPU may still write it.
_abandoned: list[Any] = []


@dataclass
class MetalBuffer:
    """Shared memory: the bytes as the host sees them, and Metal's object.

    `view` does not keep the memory, so it stands first: fields go in their order (slots would be sorted by name).
    """

    view: npt.NDArray[np.uint8]
    object: Any
    nbytes: int
    label: str
    keep: object = None


@dataclass(slots=True)
class _Pending:
    """A command buffer on its way, and what must stay until it is done."""

    buffer: Any
    value: int
    what: str
    keep: Any


class _Shared:
    """Compiled kernels of one GPU, shared by all engines of the process."""

    def __init__(self) -> None:
        self.libraries: dict[str, Any] = {}
        self.pipelines: dict[tuple[Any, ...], Any] = {}


@cache
def _shared(registry: int) -> _Shared:
    return _Shared()


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


class MetalDevice(Device):
    """The system's GPU. `wait_s` bounds every wait. A command buffer that failed, or did not end, is a `DeviceError`,
    and the device refuses everything after it."""

    runs_ahead = True

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self.objc, self.metal, self.foundation = frameworks()
        metal = self.metal
        self._dead = ""
        self._pending: list[_Pending] = []
        self._late: list[_Pending] = []
        self._value = 0
        self._wait_s = wait_s
        self.encoded = self.recorded = self.replayed = 0
        with self.pool():
            self.gpu = metal.MTLCreateSystemDefaultDevice()
            if self.gpu is None:
                raise UnsupportedError("device metal: this Mac gives no GPU to this process")
            self.name = str(self.gpu.name())
            self.simd_matrix = bool(self.gpu.supportsFamily_(metal.MTLGPUFamilyApple7))
            self._check_gpu()
            self._shared = _shared(int(self.gpu.registryID()))
            self._queue = self.made(self.gpu.newCommandQueue(), "a command queue")
            self._event = self.made(self.gpu.newSharedEvent(), "a shared event")
            self.profile = Profile(
                "metal",
                unified_memory=True,
                max_threads=int(self.gpu.maxThreadsPerThreadgroup().width),
                max_threadgroup_bytes=int(self.gpu.maxThreadgroupMemoryLength()),
                max_buffer_bytes=min(int(self.gpu.maxBufferLength()), MAX_BUFFER_BYTES),
                simd_matrix=self.simd_matrix,
                off=tiers_off(),
            )
            self._residency = self._make_residency_set()
        self._check_ownership()
        self._capture = Capture(self) if os.environ.get("MINFER_METAL_CAPTURE") else None
        self._replay: bool | None = None
        self._counters: Counters | None = None

    def _check_gpu(self) -> None:
        metal = self.metal
        if not self.gpu.hasUnifiedMemory():
            raise UnsupportedError(f"device metal: {self.name} has memory of its own; an Apple GPU is needed")
        if not (self.simd_matrix or self.gpu.supportsFamily_(metal.MTLGPUFamilyMetal3)):
            raise UnsupportedError(f"device metal: {self.name} has no simdgroup reductions (Apple7 or Metal 3)")

    def _check_ownership(self) -> None:
        """Whether PyObjC lets go of what `new...` methods give: one reference too many is a leak, and said."""
        with self.pool():
            probe = self.made(
                self.gpu.newBufferWithLength_options_(PAGE, self.metal.MTLResourceStorageModeShared), "a buffer"
            )
            self.references = int(probe.retainCount())
        if self.references != 1:
            _say_once(
                f"minfer: PyObjC {self.objc.__version__} holds Metal objects {self.references - 1} times too often: "
                "memory is given back only when the process ends. Please report this, with the version of macOS"
            )

    def facts(self) -> dict[str, str]:
        from minfer.backends.gpu.devices.metal import checks

        return checks.facts(self)

    def checks(self, *, risky: bool) -> Iterator[Check]:
        from minfer.backends.gpu.devices.metal import checks

        return checks.run(self, risky=risky)

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        """What Metal hands out for a moment is let go at the end of the block."""
        with self.objc.autorelease_pool():
            yield

    def made(self, made: Any, what: str) -> Any:
        if made is None:
            raise self._die(f"Metal gave no {what.removeprefix('a ')}: {self.name} is gone or out of resources")
        return made

    def _die(self, text: str) -> DeviceError:
        """The end of the device. What the GPU may still touch is kept for the rest of the process."""
        self._dead = text
        _abandoned.extend(pending.keep for pending in self._pending)
        self._pending, self._late = [], []
        return DeviceError(f"device metal stopped: {text}")

    def _alive(self) -> None:
        if self._dead:
            raise DeviceError(f"device metal stopped at an earlier fault: {self._dead}. Load the model again")

    # --- memory --------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int, label: str) -> MetalBuffer:
        self._alive()
        length = max(nbytes, 16)
        with self.pool():
            made = None
            if length <= self.profile.max_buffer_bytes:
                made = self.gpu.newBufferWithLength_options_(length, self.metal.MTLResourceStorageModeShared)
            if made is None:
                raise DeviceMemoryError(
                    f"{label}: {nbytes:,} bytes asked for, {self.memory()[0]:,} bytes free; a buffer holds up to "
                    f"{self.profile.max_buffer_bytes:,}"
                )
            made.setLabel_(label)
            # Metal hands out zeroed pages.
            view = np.frombuffer(made.contents().as_buffer(length), np.uint8)
        return MetalBuffer(view, made, length, label)

    def wrap(self, address: int, nbytes: int, keep: object, label: str) -> tuple[MetalBuffer, int]:
        self._alive()
        offset = address % mmap.PAGESIZE
        length = -(-(offset + nbytes) // PAGE) * PAGE
        # Python's mmap ends where the file does, the mapping with its page: the rest is reached by address.
        memory = (ctypes.c_char * length).from_address(address - offset)
        # Pages come from the file now, once, rather than in the middle of the first step.
        view = np.frombuffer(memoryview((ctypes.c_ubyte * (offset + nbytes)).from_address(address - offset)), np.uint8)
        int(view[:: mmap.PAGESIZE].sum())
        with self.pool():
            made = self.gpu.newBufferWithBytesNoCopy_length_options_deallocator_(
                memory, length, self.metal.MTLResourceStorageModeShared, None
            )
            if made is None:
                raise DeviceMemoryError(
                    f"{label}: Metal does not map {length:,} bytes, {self.memory()[0]:,} bytes free"
                )
            made.setLabel_(label)
            if self._residency is not None:
                self._residency.addAllocation_(made)
                self._residency.commit()
                self._residency.requestResidency()
        return MetalBuffer(view, made, length, label, keep), offset

    def write(self, buffer: MetalBuffer, offset: int, data: bytes | memoryview) -> None:
        """Through the view, with no message; but never under the feet of a step that may read it."""
        self.synchronize()
        raw = np.frombuffer(data, np.uint8)
        _part(buffer, offset, raw.nbytes)[:] = raw

    def read(self, buffer: MetalBuffer, offset: int, nbytes: int) -> bytes:
        self.synchronize()
        return _part(buffer, offset, nbytes).tobytes()

    def copy(
        self, source: MetalBuffer, source_offset: int, target: MetalBuffer, target_offset: int, nbytes: int
    ) -> None:
        def encode(commands: Any) -> None:
            encoder = self.made(commands.blitCommandEncoder(), "a blit encoder")
            encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
                source.object, source_offset, target.object, target_offset, nbytes
            )
            encoder.endEncoding()

        self.submit(encode, f"copy of {nbytes:,} bytes from {source.label} to {target.label}", (source, target))

    def memory(self) -> tuple[int, int]:
        total = int(self.gpu.recommendedMaxWorkingSetSize())
        return max(0, total - int(self.gpu.currentAllocatedSize())), total

    def _make_residency_set(self) -> Any:
        """Keeps weights resident between steps, where macOS has it (15)."""
        if not self.objc.macos_available(15, 0):
            return None
        made, _ = self.gpu.newResidencySetWithDescriptor_error_(
            self.metal.MTLResidencySetDescriptor.alloc().init(), None
        )
        if made is not None:
            self._queue.addResidencySet_(made)
        return made

    def close(self) -> None:
        """Wait for what is on its way, then let go of everything."""
        if not self._dead:
            with contextlib.suppress(DeviceError):
                self.synchronize()
        if self._capture:
            self._capture.stop()
        if self._residency is not None:
            with self.pool():
                self._queue.removeResidencySet_(self._residency)
                self._residency.removeAllAllocations()
                self._residency.endResidency()
            self._residency = None
        self._counters = None
        self._dead = self._dead or "it was closed"

    # --- kernels -------------------------------------------------------------------------------------------------

    def library(self, family: str) -> Any:
        """A family's kernels, compiled once a process for each text."""
        text = source(family)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._shared.libraries:
            metal = self.metal
            options = metal.MTLCompileOptions.alloc().init()
            options.setLanguageVersion_(metal.MTLLanguageVersion3_1)
            if self.objc.macos_available(15, 0):
                options.setMathMode_(metal.MTLMathModeSafe)
                options.setMathFloatingPointFunctions_(metal.MTLMathFloatingPointFunctionsPrecise)
            else:
                options.setFastMathEnabled_(False)
            made, error = self.gpu.newLibraryWithSource_options_error_(text, options, None)
            if made is None:
                raise UnsupportedError(
                    f"{family}.metal does not compile on {self.name}:\n{compiler_text(family, error)}"
                )
            self._shared.libraries[key] = made
        return self._shared.libraries[key]

    def pipeline(self, launch: Launch) -> Any:
        """A kernel with its constants. Raises `UnsupportedError` where Metal refuses it or its threadgroup."""
        key = (launch.family, launch.kernel, launch.constants)
        found = self._shared.pipelines.get(key)
        if found is None:
            with self.pool():
                found = self._shared.pipelines[key] = self._make_pipeline(launch)
        made, most = found
        if launch.threads > most:
            raise UnsupportedError(
                f"{launch.node}: {launch.kernel} is launched with {launch.threads} threads a threadgroup; {self.name} "
                f"runs it with up to {most}"
            )
        return made

    def _make_pipeline(self, launch: Launch) -> tuple[Any, int]:
        metal = self.metal
        declared = {name: (kind, int(index)) for kind, name, index in _CONSTANT.findall(source(launch.family))}
        values = metal.MTLFunctionConstantValues.alloc().init()
        for name, value in launch.constants:
            if name not in declared:
                raise UnsupportedError(f"{launch.family}.metal has no function constant {name!r}")
            kind, index = declared[name]
            type_name, ctype = _CONSTANT_TYPES[kind]
            cell = ctype(value)
            values.setConstantValue_type_atIndex_(ctypes.addressof(cell), getattr(metal, type_name), index)
        library = self.library(launch.family)
        function, error = library.newFunctionWithName_constantValues_error_(launch.kernel, values, None)
        if function is None:
            raise UnsupportedError(f"{launch.family}.metal, kernel {launch.kernel}: {error_text(error)}")
        descriptor = metal.MTLComputePipelineDescriptor.alloc().init()
        descriptor.setLabel_(launch.kernel)
        descriptor.setComputeFunction_(function)
        descriptor.setSupportIndirectCommandBuffers_(True)
        made, error = self.gpu.newComputePipelineStateWithDescriptor_options_reflection_error_(
            descriptor, metal.MTLPipelineOptionNone, None, None
        )
        if made is None:
            raise UnsupportedError(f"{launch.family}.metal, kernel {launch.kernel} on {self.name}: {error_text(error)}")
        if made.threadExecutionWidth() != 32:
            raise UnsupportedError(
                f"{self.name} has simdgroups of {made.threadExecutionWidth()} threads; kernels need 32"
            )
        return made, int(made.maxTotalThreadsPerThreadgroup())

    # --- launches ------------------------------------------------------------------------------------------------

    def encode(self, steps: Sequence[Step]) -> None:
        self.encoded += 1
        Direct(self, steps, keep=False).run()

    def record(self, steps: Sequence[Step]) -> Recording:
        self.recorded += 1
        if steps and len(steps) <= MAX_COMMANDS and self._may_replay():
            return Replay(self, steps)
        return Direct(self, steps, keep=True)

    def replayable(self) -> str | None:
        """None where replay may be tried unasked, else why not: GPUs before Apple9 need a workaround."""
        if self.gpu.supportsFamily_(self.metal.MTLGPUFamilyApple9):
            return None
        return f"{self.name} is not of the family Apple9 (M3) or later"

    def times(self, steps: Sequence[Step]) -> list[float]:
        self._alive()
        self._counters = self._counters or Counters(self)
        return self._counters.times(steps)

    def _may_replay(self) -> bool:
        if self._replay is None:
            from minfer.backends.gpu.devices.metal.self_test import decide

            self._replay = decide(self)
        return self._replay

    def submit(self, encode: Callable[[Any], None], what: str, keep: Any) -> None:
        """Encode into a new command buffer and send it on its way."""
        self._alive()
        self._look_back()
        if len(self._pending) >= MAX_PENDING:
            self.synchronize()
        if self._capture:
            self._capture.start()
        with self.pool():
            commands = self.made(self._queue.commandBuffer(), "a command buffer")
            encode(commands)
            self._value += 1
            commands.encodeSignalEvent_value_(self._event, self._value)
            commands.commit()
            self._pending.append(_Pending(commands, self._value, what, keep))

    def synchronize(self) -> None:
        """Wait, bounded, for the last command buffer; command buffers of a queue end in order."""
        self._alive()
        self._look_back()
        if not self._pending:
            return
        last, error_status = self._pending[-1], self.metal.MTLCommandBufferStatusError
        with self.pool():
            slices = max(1, int(self._wait_s * 1000 / WAIT_SLICE_MS))
            for _ in range(slices):
                if self._event.waitUntilSignaledValue_timeoutMS_(last.value, WAIT_SLICE_MS):
                    break
                if failed := [p for p in self._pending if p.buffer.status() == error_status]:
                    raise self._failed(failed[0])
            else:
                raise self._die(
                    f"no end of {last.what} within {self._wait_s:g} s. A launch cannot be cancelled; if the system "
                    "hangs, restart it before the next run"
                )
            self._late = self._unfinished(self._pending)
        self._pending = []
        if self._capture:
            self._capture.waited()

    @property
    def late(self) -> int:
        """Command buffers that were waited for and had no last status then."""
        return len(self._late)

    @property
    def resident(self) -> bool:
        """Whether weights are in a residency set."""
        return self._residency is not None

    def wait_for_nothing(self, milliseconds: int) -> bool:
        """Wait for a signal that nobody sends: False, at the end of the bound."""
        with self.pool():
            return bool(self._event.waitUntilSignaledValue_timeoutMS_(self._value + 1, milliseconds))

    def _unfinished(self, sent: list[_Pending]) -> list[_Pending]:
        """Those of `sent` that have no last status yet, which may come after the signal. Raises for a failed one."""
        statuses = [pending.buffer.status() for pending in sent]
        for pending, status in zip(sent, statuses, strict=True):
            if status == self.metal.MTLCommandBufferStatusError:
                raise self._failed(pending)
        done = self.metal.MTLCommandBufferStatusCompleted
        return [pending for pending, status in zip(sent, statuses, strict=True) if status != done]

    def _look_back(self) -> None:
        """An error that came after its signal is one all the same, before anything else is done."""
        if self._late:
            with self.pool():
                self._late = self._unfinished(self._late)

    def _failed(self, pending: _Pending) -> DeviceError:
        error = pending.buffer.error()
        if error is not None and error.code() == self.metal.MTLCommandBufferErrorOutOfMemory:
            free, total = self.memory()
            return self._die(
                f"{pending.what}: out of memory, {free:,} of {total:,} bytes free. Metal says: {error_text(error)}"
            )
        return self._die(f"{pending.what}: {error_text(error)}")


def _part(buffer: MetalBuffer, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    part = buffer.view[offset : offset + nbytes]
    if offset < 0 or part.nbytes != nbytes:
        raise RequestError(f"{buffer.label}: bytes {offset} to {offset + nbytes} of a buffer of {buffer.view.nbytes}")
    return part
