"""Command queues, command buffers and encoders of the software Metal device, and indirect command buffers.

A command buffer runs when it is committed, unless it waits for an event; then it runs when the event is signaled.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from .checks import CheckError, Report
from .errors import LaunchError, MslError
from .library import check_sizes, size3
from .recording import Bound, Launch, Recording
from .runtime import MAX_BUFFERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .device import Buffer, Device, Pipeline, SharedEvent

Range = tuple[int, int] | tuple[()] | None
Size = int | tuple[int, ...] | list[int]


class CommandQueue:
    """Runs command buffers in the order of their commits."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._waiting: list[CommandBuffer] = []

    def command_buffer(self, *, label: str = "") -> CommandBuffer:
        """A new, empty command buffer."""
        return CommandBuffer(self, label)

    def submit(self, buffer: CommandBuffer) -> None:
        """Take a committed command buffer (called by its commit)."""
        self._waiting.append(buffer)
        self.device.progress()

    def advance(self) -> bool:
        """Run as many command buffers as can run; True when any step was done."""
        moved = False
        while self._waiting:
            moved = self._waiting[0].advance() or moved
            if self._waiting[0].status not in ("completed", "error"):
                break
            self._waiting.pop(0)
        return moved


class CommandBuffer:
    """Encoded work. `status` is not enqueued, committed, completed or error; `error` the exception; `reports` what a
    checked device found and counted, one a launch."""

    def __init__(self, queue: CommandQueue, label: str) -> None:
        self.queue, self.device, self.label = queue, queue.device, label
        self.status = "not enqueued"
        self.error: MslError | None = None
        self.reports: list[Report] = []
        self.gpu_start_time = self.gpu_end_time = 0.0
        self._steps: list[Callable[[], bool]] = []
        self._open: ComputeEncoder | BlitEncoder | None = None
        self._next = 0

    def _begin(self, encoder: ComputeEncoder | BlitEncoder) -> None:
        if self.status != "not enqueued":
            raise LaunchError("the command buffer is committed; nothing more can be encoded")
        if self._open is not None:
            raise LaunchError("an encoder is open already; end it first")
        self._open = encoder

    def add(self, step: Callable[[], bool]) -> None:
        """Append a step; it returns False while it must wait."""
        self._steps.append(step)

    def close(self, encoder: ComputeEncoder | BlitEncoder) -> None:
        """The encoder has ended."""
        if self._open is not encoder:
            raise LaunchError("this encoder has been ended already")
        self._open = None

    def compute_encoder(self, *, concurrent: bool = False, label: str = "") -> ComputeEncoder:
        """An encoder for dispatches: one after the other, or (concurrent) in any order between two memory barriers."""
        encoder = ComputeEncoder(self, concurrent=concurrent, label=label)
        self._begin(encoder)
        return encoder

    def blit_encoder(self) -> BlitEncoder:
        """An encoder for copies and fills."""
        encoder = BlitEncoder(self)
        self._begin(encoder)
        return encoder

    def encode_signal_event(self, event: SharedEvent, value: int) -> None:
        """Signal `value` once everything encoded so far has run."""
        self._outside()

        def step() -> bool:
            event.signaled_value = value
            return True

        self.add(step)

    def encode_wait_for_event(self, event: SharedEvent, value: int) -> None:
        """What is encoded after this runs when the event has reached `value`."""
        self._outside()
        self.add(lambda: event.signaled_value >= value)

    def _outside(self) -> None:
        if self._open is not None:
            raise LaunchError("events are encoded between encoders; end the open one first")

    def commit(self) -> None:
        """Hand the work over. A fault does not raise here: see `status` and `error`."""
        if self._open is not None:
            raise LaunchError("an encoder is still open at commit")
        if self.status != "not enqueued":
            raise LaunchError("the command buffer is committed already")
        self.status = "committed"
        self.queue.submit(self)

    def advance(self) -> bool:
        """Run steps until one must wait."""
        if self.status != "committed":
            return False
        moved = False
        self.gpu_start_time = self.gpu_start_time or time.perf_counter()
        try:
            while self._next < len(self._steps):
                step = self._steps[self._next]
                self._next += 1  # first: a step that signals an event comes back here
                if not step():
                    self._next -= 1
                    return moved
                moved = True
        except MslError as error:
            self.status, self.error = "error", error
        else:
            self.status = "completed"
        self.gpu_end_time = time.perf_counter()
        return True

    def wait_until_completed(self, timeout_ms: float = 10_000) -> bool:
        """Wait, at most `timeout_ms`; True when it completed. Raises the error of a command buffer that failed."""
        end = time.monotonic() + timeout_ms / 1000
        while True:
            self.device.progress()
            if self.status == "error" and self.error is not None:
                raise self.error
            if self.status == "completed":
                return True
            if self.status == "not enqueued":
                raise LaunchError("the command buffer is not committed")
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)


class ComputeEncoder:
    """Collects dispatches."""

    def __init__(self, buffer: CommandBuffer, *, concurrent: bool, label: str) -> None:
        self._buffer, self.concurrent, self.label = buffer, concurrent, label
        self._pipeline: Pipeline | None = None
        self._bound: dict[int, Bound] = {}
        self._memory: dict[int, int] = {}
        self._launches: list[Launch] = []
        self._barrier = True
        self._resources: set[int] = set()

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """What the next dispatches run."""
        self._pipeline = pipeline

    def set_buffer(
        self, buffer: Buffer | None, offset: int, index: int, *, reads: Range = None, writes: Range = None
    ) -> None:
        """Bind a buffer from `offset` on. `reads` and `writes` declare byte ranges for the checked mode."""
        _slot(index)
        if buffer is None:
            self._bound.pop(index, None)
            return
        if not 0 <= offset <= buffer.length:
            raise LaunchError(f"offset {offset} is outside a buffer of {buffer.length} bytes")
        self._bound[index] = Bound(buffer, offset, reads, writes)

    def set_bytes(self, data: bytes, index: int) -> None:
        """Bind a copy of up to 4,096 bytes."""
        _slot(index)
        if not 0 < len(data) <= 4096:
            raise LaunchError(f"set_bytes of {len(data)} bytes; 1 to 4096 are allowed")
        self._bound[index] = Bound(self._buffer.device.buffer(data, label="bytes"), 0)

    def set_threadgroup_memory_length(self, length: int, index: int) -> None:
        """Room behind [[threadgroup(index)]]: a multiple of 16 bytes."""
        _slot(index)
        self._memory[index] = length

    def dispatch_threadgroups(self, groups: Size, threads: Size) -> None:
        """`groups` threadgroups of `threads` threads."""
        g, t = size3(groups), size3(threads)
        self._dispatch([a * b for a, b in zip(g, t, strict=True)], t)

    def dispatch_threads(self, grid: Size, threads: Size) -> None:
        """`grid` threads in threadgroups of `threads`; those at the edge may be smaller."""
        self._dispatch(size3(grid), size3(threads))

    def _dispatch(self, grid: Sequence[int], threads: Sequence[int]) -> None:
        if self._pipeline is None:
            raise LaunchError("dispatch without a pipeline")
        kernel = self._pipeline.kernel
        check_sizes(kernel.name, grid, threads, kernel.max_threads)
        if math.prod(grid) == 0:
            return  # Metal accepts an empty dispatch
        used = {
            a.index: self._bound[a.index] for a in kernel.arguments if a.kind == "buffer" and a.index in self._bound
        }
        memory = {
            a.index: self._memory[a.index]
            for a in kernel.arguments
            if a.kind == "threadgroup" and a.index in self._memory
        }
        barrier = self._barrier or not self.concurrent
        self._launches.append(Launch(kernel, _three(grid), _three(threads), used, memory, barrier, self.label))
        self._barrier = False

    def memory_barrier(self) -> None:
        """What is dispatched from here on sees everything dispatched before (scope: buffers)."""
        self._barrier = True

    def use_resources(self, *buffers: Buffer) -> None:
        """Make buffers resident for the indirect command buffers of this encoder."""
        self._resources |= {id(b) for b in buffers}

    def execute_commands(self, commands: IndirectCommandBuffer, start: int = 0, count: int | None = None) -> None:
        """Run recorded dispatches. Every buffer in them must have been named in `use_resources`."""
        launches = commands.launches(start, count)
        for launch in launches:
            for slot, bound in launch.buffers.items():
                if id(bound.buffer) not in self._resources:
                    raise LaunchError(
                        f"buffer {slot} of recorded kernel {launch.kernel.name} is not resident: "
                        "name it in use_resources"
                    )
        if launches and self._barrier:
            first = launches[0]
            launches[0] = Launch(
                first.kernel, first.grid, first.threads, first.buffers, first.threadgroup_memory, True, first.label
            )
        self._launches += launches
        self._barrier = not self.concurrent

    def end_encoding(self) -> None:
        """Finish; the command buffer may then open another encoder."""
        self._buffer.close(self)
        recording, buffer = Recording(self._launches), self._buffer

        def step() -> bool:
            reports = recording.run(buffer.device.run)
            buffer.reports += reports
            bad = [r for r in reports if r.findings]
            if bad:
                raise CheckError(
                    bad[0] if len(bad) == 1 else Report(bad[0].kernel, [f for r in bad for f in r.findings])
                )
            return True

        buffer.add(step)


class BlitEncoder:
    """Copies and fills, in order."""

    def __init__(self, buffer: CommandBuffer) -> None:
        self._buffer = buffer
        self._steps: list[Callable[[], bool]] = []

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size: int) -> None:
        """Copy bytes between buffers, or within one where the ranges do not overlap. Raises LaunchError."""
        _inside(source, source_offset, size)
        _inside(target, target_offset, size)
        if source is target and abs(source_offset - target_offset) < size:
            raise LaunchError("source and target of a copy overlap")

        def step() -> bool:
            target.write(source.read(source_offset, size), target_offset)
            return True

        self._steps.append(step)

    def fill(self, target: Buffer, offset: int, size: int, value: int) -> None:
        """Set bytes to `value` (0 to 255)."""
        _inside(target, offset, size)
        if not 0 <= value <= 255:
            raise LaunchError(f"fill value {value} is no byte")

        def step() -> bool:
            target.write(bytes([value]) * size, offset)
            return True

        self._steps.append(step)

    def end_encoding(self) -> None:
        """Finish."""
        self._buffer.close(self)
        for step in self._steps:
            self._buffer.add(step)


class IndirectCommand:
    """One recorded dispatch of an indirect command buffer."""

    def __init__(self, max_kernel_buffers: int) -> None:
        self._max = max_kernel_buffers
        self.reset()

    def reset(self) -> None:
        """Empty it again."""
        self._pipeline: Pipeline | None = None
        self._bound: dict[int, Bound] = {}
        self._memory: dict[int, int] = {}
        self._sizes: tuple[list[int], list[int]] | None = None
        self._barrier = False

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """The pipeline must have been made for indirect command buffers."""
        if not pipeline.support_indirect_command_buffers:
            raise LaunchError(f"pipeline {pipeline.label} was made without support_indirect_command_buffers")
        self._pipeline = pipeline

    def set_kernel_buffer(
        self, buffer: Buffer, offset: int, index: int, *, reads: Range = None, writes: Range = None
    ) -> None:
        """Bind a buffer; recorded offsets have 32 bits."""
        _slot(index)
        if index >= self._max:
            raise LaunchError(f"buffer {index} of an indirect command buffer made for {self._max}")
        if not 0 <= offset < 1 << 32 or offset > buffer.length:
            raise LaunchError(
                f"offset {offset} cannot be recorded: it must be below 2**32 "
                f"and inside the buffer of {buffer.length} bytes"
            )
        self._bound[index] = Bound(buffer, offset, reads, writes)

    def set_threadgroup_memory_length(self, length: int, index: int) -> None:
        """Room behind [[threadgroup(index)]]."""
        self._memory[index] = length

    def set_barrier(self) -> None:
        """Start only when all commands before have finished."""
        self._barrier = True

    def concurrent_dispatch_threadgroups(self, groups: Size, threads: Size) -> None:
        """`groups` threadgroups of `threads` threads."""
        g, t = size3(groups), size3(threads)
        self._sizes = ([a * b for a, b in zip(g, t, strict=True)], t)

    def concurrent_dispatch_threads(self, grid: Size, threads: Size) -> None:
        """A grid in threads."""
        self._sizes = (size3(grid), size3(threads))

    def launch(self) -> Launch | None:
        """The dispatch as a launch; None where nothing is recorded."""
        if self._sizes is None:
            return None
        if self._pipeline is None:
            raise LaunchError("a recorded dispatch has no pipeline")
        return Launch(
            self._pipeline.kernel,
            _three(self._sizes[0]),
            _three(self._sizes[1]),
            dict(self._bound),
            dict(self._memory),
            self._barrier,
        )


class IndirectCommandBuffer:
    """Dispatches recorded once and run many times."""

    def __init__(self, count: int, max_kernel_buffers: int) -> None:
        if count < 1 or not 1 <= max_kernel_buffers <= MAX_BUFFERS:
            raise LaunchError(
                f"an indirect command buffer of {count} commands with {max_kernel_buffers} buffers; "
                f"at most {MAX_BUFFERS} buffers"
            )
        self.commands = [IndirectCommand(max_kernel_buffers) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.commands)

    def command(self, index: int) -> IndirectCommand:
        """The command at an index."""
        return self.commands[index]

    def launches(self, start: int = 0, count: int | None = None) -> list[Launch]:
        """What is recorded in a range of commands."""
        end = len(self.commands) if count is None else start + count
        if not 0 <= start <= end <= len(self.commands):
            raise LaunchError(f"commands {start} to {end} of an indirect command buffer of {len(self.commands)}")
        return [launch for c in self.commands[start:end] if (launch := c.launch()) is not None]


def _slot(index: int) -> None:
    if not 0 <= index < MAX_BUFFERS:
        raise LaunchError(f"index {index}; a kernel has {MAX_BUFFERS} buffers, 0 to {MAX_BUFFERS - 1}")


def _inside(buffer: Buffer, offset: int, size: int) -> None:
    if size <= 0 or offset < 0 or offset + size > buffer.length:
        raise LaunchError(f"bytes {offset} to {offset + size} of a buffer of {buffer.length} bytes")


def _three(size: Sequence[int]) -> tuple[int, int, int]:
    return size[0], size[1], size[2]
