"""Queues, command buffers, encoders, events and indirect command buffers over the software Metal device."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from minfer.msl.errors import LaunchError

from .objects import Buffer, Error, Pipeline
from .runtime import Instance, Runtime

if TYPE_CHECKING:
    from minfer.msl import commands

    from .objects import CounterSampleBuffer
    from .runtime import Proxy


class SharedEvent(Instance):
    owner = "MTLSharedEvent"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.software = runtime.software.shared_event()

    def signaledValue(self) -> int:
        self.runtime.drain()
        return int(self.software.signaled_value)

    def waitUntilSignaledValue_timeoutMS_(self, value: int, timeout: int) -> bool:
        runtime = self.runtime
        if timeout > 600_000:
            raise runtime.fail(f"a wait of {timeout} ms is not bounded")
        runtime.drain()
        # What has not happened by now never will, so a test need not sit and wait.
        there = bool(self.software.wait_until_signaled(value, 0))
        runtime.time += runtime.faults.wait_s if there else runtime.faults.timeout_factor * timeout / 1000
        return there


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
        self.sampled: list[tuple[ComputeEncoder, CounterSampleBuffer, int, int]] = []
        self.resolved: list[tuple[CounterSampleBuffer, tuple[int, int], Buffer, int]] = []
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

    def computeCommandEncoderWithDescriptor_(self, descriptor: Proxy) -> Encoder:
        encoder = ComputeEncoder(self, concurrent=False)
        attachment = descriptor.instance.attachments.first
        if attachment.samples is not None:
            if max(attachment.start, attachment.end) >= len(attachment.samples.ticks):
                raise self.runtime.fail(f"sample {attachment.end} of {len(attachment.samples.ticks)}")
            self.use(attachment.samples)
            self.sampled.append((encoder, attachment.samples, attachment.start, attachment.end))
        return self.begin(encoder)

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
            self._count()
        for instance in self.used:
            instance.release()
        self.used = []

    def _count(self) -> None:
        """A threadgroup takes a microsecond; a launch begins where the one before ended."""
        runtime = self.runtime
        for encoder, samples, start, end in self.sampled:
            samples.ticks[start] = runtime.ticks()
            runtime.time += 1e-6 * encoder.threadgroups
            samples.ticks[end] = runtime.ticks()
            if runtime.faults.no_samples:
                samples.ticks[end] = None
        for samples, (first, count), target, offset in self.resolved:
            ticks = [2**64 - 1 if tick is None else tick for tick in samples.ticks[first : first + count]]
            target.software.write(struct.pack(f"<{count}Q", *ticks), offset)

    def status(self) -> int:
        self.runtime.drain()
        if not self.committed or self.number == self.runtime.faults.hang_at:
            return 2 if self.committed else 0
        if self._late:
            self._late -= 1
            return 3
        if self.failed:
            return 5
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
        self.software.end_encoding()

    def dealloc(self) -> None:
        if not self.ended:
            raise self.runtime.fail("an encoder was released without endEncoding")


class ComputeEncoder(Encoder):
    owner = "MTLComputeCommandEncoder"

    def __init__(self, buffer: CommandBuffer, *, concurrent: bool) -> None:
        super().__init__(buffer)
        self.software: commands.ComputeEncoder = buffer.software.compute_encoder(concurrent=concurrent)
        self.threadgroups = 0
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
        self.threadgroups += math.prod(groups)
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

    def resolveCounters_inRange_destinationBuffer_destinationOffset_(
        self, samples: Proxy, where: tuple[int, int], target: Proxy, offset: int
    ) -> None:
        self.encoding()
        if where[0] + where[1] > len(samples.instance.ticks):
            raise self.runtime.fail(f"samples {where} of {len(samples.instance.ticks)}")
        if offset + 8 * where[1] > target.instance.software.length:
            raise self.runtime.fail(f"{where[1]} samples do not fit {target.instance.software.length} bytes")
        self.buffer.use(samples.instance)
        self.buffer.use(target.instance)
        self.buffer.resolved.append((samples.instance, where, target.instance, offset))


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
