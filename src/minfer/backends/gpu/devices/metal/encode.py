"""Lists of launches as Metal takes them: encoded anew each time, or kept in an indirect command buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.backends.gpu.devices.base import Step
    from minfer.backends.gpu.devices.metal import MetalBuffer, MetalDevice

#: Alignment of an argument struct in the arena of a recording.
ARGUMENT_ALIGNMENT = 256
#: Commands in one indirect command buffer.
MAX_COMMANDS = 16384


def describe(steps: Sequence[Step]) -> str:
    if not steps:
        return "no launches"
    first, last = steps[0].launch, steps[-1].launch
    return f"{len(steps)} launches, {first.node} ({first.kernel}) to {last.node} ({last.kernel})"


def arena(device: MetalDevice, steps: Sequence[Step]) -> tuple[MetalBuffer, list[int]]:
    """The argument structs of all steps in one buffer, and where each lies."""
    raw, starts = bytearray(), []
    for step in steps:
        starts.append(len(raw))
        raw += step.launch.args
        raw += bytes(-len(raw) % ARGUMENT_ALIGNMENT)
    buffer = device.buffer(len(raw), "arguments")
    device.write(buffer, 0, bytes(raw))
    return buffer, starts


def _sizes(step: Step) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Threadgroups of a launch, and threads of each."""
    return tuple(map(int, step.launch.grid)), (int(step.launch.threads), 1, 1)


#: A launch ready to be sent: barrier, pipeline, arguments, buffers, offsets, (first slot, slots), (grid, threads).
Encoded = tuple[bool, Any, bytes, list[Any], list[int], tuple[int, int], tuple[Any, Any]]


class Direct:
    """Steps encoded anew for each run. To `keep` them costs a buffer for their arguments and saves a message a launch:
    at most four then, five without."""

    def __init__(self, device: MetalDevice, steps: Sequence[Step], *, keep: bool) -> None:
        self._device = device
        self._steps = steps
        self._what = describe(steps)
        self._encoded: list[Encoded] = []
        self._arena: MetalBuffer | None = None
        starts = [0] * len(steps)
        if keep and steps:
            self._arena, starts = arena(device, steps)
        with device.pool():
            for step, start in zip(steps, starts, strict=True):
                bound = {b.slot: (b.buffer.object, b.offset) for b in step.bound}
                if self._arena:
                    bound[0] = (self._arena.object, start)
                first, end = 0 if self._arena else 1, max(bound, default=0) + 1
                # Slots that a launch leaves out are unbound: nothing of another launch stays in reach.
                filled = [bound.get(slot, (None, 0)) for slot in range(first, end)]
                objects, offsets = [f[0] for f in filled], [int(f[1]) for f in filled]
                args = b"" if self._arena else step.launch.args
                pipeline = device.pipeline(step.launch)
                self._encoded.append(
                    (step.barrier, pipeline, args, objects, offsets, (first, len(filled)), _sizes(step))
                )

    def run(self) -> None:
        if self._steps:
            self._device.submit(self._encode, self._what, self)

    def _encode(self, commands: Any) -> None:
        kind = self._device.metal.MTLDispatchTypeConcurrent
        encoder = self._device.made(commands.computeCommandEncoderWithDispatchType_(kind), "a compute encoder")
        try:
            self.put(encoder, self._encoded)
        finally:
            encoder.endEncoding()  # Metal aborts the process where an encoder goes without it

    def put(self, encoder: Any, some: Sequence[Encoded]) -> None:
        """Launches into an encoder that is open."""
        current = None
        for barrier, pipeline, args, objects, offsets, slots, (groups, threads) in some:
            if barrier:
                encoder.memoryBarrierWithScope_(self._device.metal.MTLBarrierScopeBuffers)
            if pipeline is not current:
                encoder.setComputePipelineState_(pipeline)
                current = pipeline
            if args:
                encoder.setBytes_length_atIndex_(args, len(args), 0)
            if objects:
                encoder.setBuffers_offsets_withRange_(objects, offsets, slots)
            encoder.dispatchThreadgroups_threadsPerThreadgroup_(groups, threads)


class Replay:
    """Steps in an indirect command buffer: a run is about ten messages, however many launches there are."""

    def __init__(self, device: MetalDevice, steps: Sequence[Step]) -> None:
        self._device = device
        self._steps = steps
        self._what = f"replay of {describe(steps)}"
        self._arena, starts = arena(device, steps)
        with device.pool():
            self._record(starts)

    def _record(self, starts: Sequence[int]) -> None:
        device, metal = self._device, self._device.metal
        pipelines = [device.pipeline(step.launch) for step in self._steps]
        descriptor = metal.MTLIndirectCommandBufferDescriptor.alloc().init()
        descriptor.setCommandTypes_(metal.MTLIndirectCommandTypeConcurrentDispatch)
        descriptor.setInheritBuffers_(False)
        descriptor.setInheritPipelineState_(False)
        last = max((b.slot for step in self._steps for b in step.bound), default=0)
        descriptor.setMaxKernelBufferBindCount_(last + 1)
        self._commands = device.made(
            device.gpu.newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(
                descriptor, len(self._steps), metal.MTLResourceStorageModeShared
            ),
            "an indirect command buffer",
        )
        writes: dict[int, bool] = {id(self._arena.object): False}
        objects = {id(self._arena.object): self._arena.object}
        for i, (step, pipeline, start) in enumerate(zip(self._steps, pipelines, starts, strict=True)):
            command = self._commands.indirectComputeCommandAtIndex_(i)
            command.setComputePipelineState_(pipeline)
            command.setKernelBuffer_offset_atIndex_(self._arena.object, start, 0)
            for b in step.bound:
                command.setKernelBuffer_offset_atIndex_(b.buffer.object, int(b.offset), b.slot)
                key = id(b.buffer.object)
                objects[key] = b.buffer.object
                writes[key] = writes.get(key, False) or b.writes
            if step.barrier:
                command.setBarrier()
            command.concurrentDispatchThreadgroups_threadsPerThreadgroup_(*_sizes(step))
        self._read = [objects[key] for key, written in writes.items() if not written]
        self._written = [objects[key] for key, written in writes.items() if written]
        # Before Apple9 a pipeline that was never bound to an encoder may not be there when the commands run.
        self._bind = list({id(p): p for p in pipelines}.values()) if device.replayable() else []

    def run(self) -> None:
        self._device.replayed += 1
        self._device.submit(self._encode, self._what, self)

    def _encode(self, commands: Any) -> None:
        metal = self._device.metal
        encoder = self._device.made(
            commands.computeCommandEncoderWithDispatchType_(metal.MTLDispatchTypeConcurrent), "a compute encoder"
        )
        try:
            read_write = metal.MTLResourceUsageRead | metal.MTLResourceUsageWrite
            if self._read:
                encoder.useResources_count_usage_(self._read, len(self._read), metal.MTLResourceUsageRead)
            if self._written:
                encoder.useResources_count_usage_(self._written, len(self._written), read_write)
            for pipeline in self._bind:
                encoder.setComputePipelineState_(pipeline)
                encoder.dispatchThreadgroups_threadsPerThreadgroup_((0, 1, 1), (1, 1, 1))
            encoder.executeCommandsInBuffer_withRange_(self._commands, (0, len(self._steps)))
        finally:
            encoder.endEncoding()
