"""The software Metal device: buffers, libraries, pipelines, events. Names follow Metal's, spelled the Python way.

Limits are the strictest of the Apple M1 to M5: what runs here fits everywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from . import runtime
from .commands import CommandQueue, IndirectCommandBuffer
from .errors import LaunchError
from .library import Kernel, Library
from .recording import Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .emit import Value

PAGE = 16384
MAX_BYTES_ARGUMENT = 4096


class Buffer:
    """Device memory. `address` is where it lies, `length` its size in bytes, `backed` how many of them really exist
    (less than `length` only for a mapped file that was rounded up to a page). Fresh memory holds no values: a checked
    launch that reads it reports that."""

    def __init__(self, device: Device, length: int, data: object | None, label: str) -> None:
        if length <= 0 or length > device.max_buffer_length:
            raise LaunchError(f"a buffer of {length} bytes; 1 to {device.max_buffer_length} are allowed")
        self.device, self.length, self.backed, self.label = device, length, length, label
        padded = -(-length // PAGE) * PAGE
        self._memory: Any = mmap.mmap(-1, padded)
        self._array = np.frombuffer(self._memory, np.uint8)[:length]
        self.address = int(self._array.ctypes.data)
        self.initialised: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if data is not None:
            self._array[:] = np.frombuffer(memoryview(data).cast("B"), np.uint8)  # type: ignore[arg-type]
        elif device.track_initialised:
            self.initialised = np.zeros((length + 7) // 8, np.uint8)

    @classmethod
    def no_copy(cls, device: Device, address: int, length: int, keep: object, backed: int | None, label: str) -> Buffer:
        """Memory of the caller; `keep` is held as long as the buffer."""
        if length <= 0 or length % PAGE:
            raise LaunchError(
                f"a no-copy buffer of {length} bytes; its length must be a multiple of the page size {PAGE}"
            )
        if address % mmap.PAGESIZE:
            raise LaunchError(f"a no-copy buffer at {address:#x}; its address must be page aligned")
        self = cls.__new__(cls)
        self.device, self.length, self.label = device, length, label
        self.backed = length if backed is None else min(backed, length)
        self._memory, self.address, self.initialised = keep, address, None
        self._array = np.ctypeslib.as_array((ctypes.c_uint8 * self.backed).from_address(address))
        return self

    def contents(self) -> memoryview:
        """The memory itself. Who asks for it may write it, so all of it counts as initialised from now on."""
        self.mark_initialised()
        return memoryview(self._array)  # type: ignore[arg-type]

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """A copy of some bytes. Raises LaunchError outside the buffer."""
        return self._part(offset, length).tobytes()

    def write(self, data: object, offset: int = 0) -> None:
        """Store bytes (anything with the buffer protocol). Raises LaunchError outside the buffer."""
        raw = np.frombuffer(memoryview(data).cast("B"), np.uint8)  # type: ignore[arg-type]
        self._part(offset, len(raw))[:] = raw
        self.mark_initialised(offset, len(raw))

    def _part(self, offset: int, length: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        end = self.backed if length is None else offset + length
        if not 0 <= offset <= end <= self.backed:
            raise LaunchError(f"bytes {offset} to {end} of a buffer of {self.backed} bytes")
        return self._array[offset:end]

    def mark_initialised(self, offset: int = 0, length: int | None = None, *, value: bool = True) -> None:
        """Say that bytes hold values, or (value=False) that they hold none any more: recycled memory."""
        if self.initialised is None:
            if value or not self.device.track_initialised:
                return
            self.initialised = np.full((self.length + 7) // 8, 0xFF, np.uint8)
        end = self.length if length is None else offset + length
        if offset % 8 == 0 and (end % 8 == 0 or end == self.length):
            self.initialised[offset // 8 : (end + 7) // 8] = 0xFF if value else 0
            return
        bits = np.unpackbits(self.initialised, bitorder="little")
        bits[offset:end] = value
        self.initialised[:] = np.packbits(bits, bitorder="little")


class Pipeline:
    """A compiled kernel with its function constants."""

    thread_execution_width = runtime.SIMD_WIDTH

    def __init__(self, kernel: Kernel, *, support_indirect_command_buffers: bool, label: str) -> None:
        self.kernel, self.support_indirect_command_buffers = kernel, support_indirect_command_buffers
        self.label = label or kernel.name
        self.max_total_threads_per_threadgroup = kernel.max_threads


class SharedEvent:
    """A counter that hosts and command buffers signal and wait for. Its value never goes down."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._value = 0
        self._changed = threading.Condition()

    @property
    def signaled_value(self) -> int:
        """The value now."""
        return self._value

    @signaled_value.setter
    def signaled_value(self, value: int) -> None:
        with self._changed:
            self._value = max(self._value, value)
            self._changed.notify_all()
        self.device.progress()

    def wait_until_signaled(self, value: int, timeout_ms: float) -> bool:
        """Wait at most `timeout_ms`; False when the value was not reached."""
        self.device.progress()
        end = time.monotonic() + timeout_ms / 1000
        with self._changed:
            while self._value < value:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True


class Device:
    """A Metal device made of this machine's processors.

    `check` runs every launch with all checks; findings make a command buffer fail and are kept in `reports`. `count`
    also counts the bytes of every buffer.
    `order` (forward, backward, shuffled by `seed`, lockstep) is the order of lanes and threadgroups, and of launches
    that no barrier orders. `compiler` is g++, clang, zig or a command. `timeout` is how many seconds no threadgroup may
    begin or end: then the launch fails.
    """

    name = "software Metal device"
    max_threads_per_threadgroup = runtime.MAX_THREADS
    max_threadgroup_memory_length = runtime.MAX_THREADGROUP_BYTES
    max_buffer_arguments = runtime.MAX_BUFFERS
    max_buffer_length = 1 << 33
    has_unified_memory = True

    def __init__(
        self,
        *,
        check: bool = False,
        count: bool = False,
        order: str = "forward",
        seed: int = 0,
        os_threads: int | None = None,
        compiler: str | None = None,
        timeout: float = runtime.TIMEOUT_S,
    ) -> None:
        self.run = Run(check, count, order, seed, os_threads, timeout)
        self.track_initialised = check
        self.compiler = compiler
        self.queues: list[CommandQueue] = []
        self.lock = threading.RLock()
        self._busy = False

    def buffer(self, data_or_length: object, *, label: str = "") -> Buffer:
        """A new buffer: of that many bytes, or with a copy of the data (anything with the buffer protocol)."""
        if isinstance(data_or_length, int):
            return Buffer(self, data_or_length, None, label)
        data = memoryview(data_or_length)  # type: ignore[arg-type]
        return Buffer(self, data.nbytes, data, label)

    def buffer_no_copy(
        self, address: int, length: int, *, keep: object = None, backed: int | None = None, label: str = ""
    ) -> Buffer:
        """A buffer over the caller's memory; its length must be a multiple of 16,384 and its address page aligned.

        `backed` is how many bytes may really be touched (a file ends before its last page does).
        """
        return Buffer.no_copy(self, address, length, keep, backed, label)

    def library(
        self,
        source: str,
        *,
        name: str = "source.metal",
        include_dirs: Sequence[Path | str] = (),
        defines: Mapping[str, str] | None = None,
    ) -> Library:
        """Parse a Metal source. Raises SourceError with file and line."""
        return Library(source, name=name, include_dirs=include_dirs, defines=defines, compiler=self.compiler)

    def pipeline(
        self,
        library: Library,
        name: str,
        constants: Mapping[str | int, Value] | None = None,
        *,
        support_indirect_command_buffers: bool = False,
        label: str = "",
        build: bool = True,
    ) -> Pipeline:
        """A kernel ready to launch. It is compiled here unless `build` is False (then with its first launch)."""
        kernel = library.kernel(name, constants)
        if build:
            kernel.entry("lockstep" if self.run.order == "lockstep" else "checked" if self.run.check else "fast")
        return Pipeline(kernel, support_indirect_command_buffers=support_indirect_command_buffers, label=label)

    def command_queue(self) -> CommandQueue:
        """A queue; its command buffers run in the order in which they are committed."""
        queue = CommandQueue(self)
        self.queues.append(queue)
        return queue

    def shared_event(self) -> SharedEvent:
        """A new event, at 0."""
        return SharedEvent(self)

    def indirect_command_buffer(
        self, count: int, *, max_kernel_buffers: int = runtime.MAX_BUFFERS
    ) -> IndirectCommandBuffer:
        """Room for `count` recorded dispatches."""
        return IndirectCommandBuffer(count, max_kernel_buffers)

    def progress(self) -> None:
        """Run what has been committed and waits for nothing any more."""
        with self.lock:
            if self._busy:  # a step signaled an event: the loop below goes on anyway
                return
            self._busy = True
            try:
                while sum(queue.advance() for queue in self.queues):  # every queue, not only the first that moves
                    pass
            finally:
                self._busy = False
