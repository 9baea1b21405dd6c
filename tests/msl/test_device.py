"""The software Metal device: buffers, encoders, order of launches, indirect command buffers, events, limits."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import numpy as np
import pytest

from minfer.msl import CheckError, LaunchError, MslError
from minfer.msl.device import Device, Pipeline
from minfer.msl.recording import Bound, Launch, Recording, Run

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant int step [[function_constant(0)]];
kernel void add(device int * x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += step; }
kernel void twice(device int * x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2; }
kernel void copy(device const int * x [[buffer(0)]], device int * y [[buffer(1)]], constant int & plus [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) {
    y[i] = x[i] + plus;
}
[[max_total_threads_per_threadgroup(64)]]
kernel void narrow(device int * x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }
kernel void dynamic(device int * x [[buffer(0)]], threadgroup int * t [[threadgroup(0)]],
                    uint i [[thread_index_in_threadgroup]]) {
    t[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x[i] = t[63 - i];
}
"""


class World:
    """A device with the pipelines of SOURCE."""

    def __init__(self, **options: Any) -> None:
        self.device = Device(**options)
        library = self.device.library(SOURCE)
        constants: dict[str, dict[str | int, Any]] = {"add": {"step": 3}}
        wanted = [(n, constants.get(n, {})) for n in library.kernel_names]
        library.prepare(wanted, "checked" if options.get("check") else "fast")
        self.pipelines: dict[str, Pipeline] = {
            n: self.device.pipeline(library, n, given, support_indirect_command_buffers=True) for n, given in wanted
        }
        self.queue = self.device.command_queue()

    def ints(self, n: int = 64) -> Any:
        return self.device.buffer(np.zeros(n, np.int32), label="ints")


def values(buffer: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(buffer.read(), np.int32)


def test_encoders_run_in_order_and_blits_move_bytes() -> None:
    w = World()
    a, b = w.ints(), w.ints()
    cb = w.queue.command_buffer()
    e = cb.compute_encoder()
    e.set_buffer(a, 0, 0)
    e.set_pipeline(w.pipelines["add"])
    e.dispatch_threadgroups(2, 32)
    e.set_pipeline(w.pipelines["twice"])
    e.dispatch_threads(10, 32)
    e.end_encoding()
    blit = cb.blit_encoder()
    blit.copy(a, 0, b, 128, 128)
    blit.fill(b, 0, 4, 1)
    blit.end_encoding()
    e = cb.compute_encoder()
    e.set_pipeline(w.pipelines["copy"])
    e.set_buffer(b, 128, 0)
    e.set_buffer(b, 0, 1)
    e.set_bytes(np.int32(100).tobytes(), 2)
    e.dispatch_threads(2, 1)
    e.end_encoding()
    assert cb.status == "not enqueued"
    cb.commit()
    assert cb.wait_until_completed(1000)
    assert list(values(a)) == [6] * 10 + [3] * 54
    assert list(values(b)) == [106] * 2 + [0] * 30 + [6] * 10 + [3] * 22


def test_launches_without_a_barrier_run_in_any_order() -> None:
    results = set()
    for seed in range(8):
        w = World(order="shuffled", seed=seed)
        a = w.ints(1)
        cb = w.queue.command_buffer()
        e = cb.compute_encoder(concurrent=True)
        e.set_buffer(a, 0, 0)
        for name in ("add", "twice"):
            e.set_pipeline(w.pipelines[name])
            e.dispatch_threads(1, 1)
        e.end_encoding()
        cb.commit()
        cb.wait_until_completed()
        results.add(int(values(a)[0]))
    assert results == {6, 3}
    for seed in range(8):
        w = World(order="shuffled", seed=seed)
        a = w.ints(1)
        cb = w.queue.command_buffer()
        e = cb.compute_encoder(concurrent=True)
        e.set_buffer(a, 0, 0)
        for name in ("add", "twice"):
            e.set_pipeline(w.pipelines[name])
            e.dispatch_threads(1, 1)
            e.memory_barrier()
        e.end_encoding()
        cb.commit()
        cb.wait_until_completed()
        assert values(a)[0] == 6


@pytest.mark.parametrize("barrier", [True, False])
def test_a_missing_barrier_between_launches_is_found(barrier: bool) -> None:
    w = World(check=True)
    a, b, c = w.ints(), w.ints(), w.ints()
    plus = w.device.buffer(np.int32(0))
    kernel = w.pipelines["copy"].kernel

    def copy(x: Any, y: Any, wait: bool) -> Launch:
        return Launch(kernel, (64, 1, 1), (64, 1, 1), {0: Bound(x), 1: Bound(y), 2: Bound(plus)}, barrier=wait)

    reports = Recording([copy(a, b, False), copy(b, c, barrier)]).run(Run(check=True, count=True))
    found = [f for r in reports for f in r.findings]
    assert [f.kind for f in found] == ([] if barrier else ["race between launches"])
    for seed in range(6):  # the launch that carries the barrier is not always the first behind it
        d, e = w.ints(), w.ints()
        launches = [copy(a, b, False), copy(a, c, False), copy(b, d, barrier), copy(c, e, False)]
        shuffled = Recording(launches).run(Run(check=True, order="shuffled", seed=seed))
        assert bool([f for r in shuffled for f in r.findings]) == (not barrier)
    if found:
        assert (found[0].buffer, found[0].name, found[0].label, found[0].size) == (0, "x", "ints", 256)
    assert [r.counters.written_distinct[1] for r in reports] == [256, 256]


def test_two_launches_may_share_a_buffer_without_sharing_bytes() -> None:
    w = World(check=True)
    a, plus = w.ints(128), w.device.buffer(np.int32(0))
    kernel = w.pipelines["copy"].kernel
    launches = [
        Launch(kernel, (32, 1, 1), (32, 1, 1), {0: Bound(a, 0), 1: Bound(a, 128), 2: Bound(plus)}, barrier=False),
        Launch(kernel, (32, 1, 1), (32, 1, 1), {0: Bound(a, 0), 1: Bound(a, 256), 2: Bound(plus)}, barrier=False),
    ]
    assert not [f for r in Recording(launches).run(Run(check=True)) for f in r.findings]


def test_a_barrier_ends_what_may_clash() -> None:
    w = World(check=True)
    a, b, c, d = w.ints(), w.ints(), w.ints(), w.ints()
    plus = w.device.buffer(np.int32(0))
    launches = [
        Launch(
            w.pipelines["copy"].kernel,
            (64, 1, 1),
            (64, 1, 1),
            {0: Bound(x), 1: Bound(y), 2: Bound(plus)},
            barrier=barrier,
        )
        for x, y, barrier in [(a, b, False), (a, c, False), (b, a, True), (b, d, False)]
    ]
    assert not [f for r in Recording(launches).run(Run(check=True)) for f in r.findings]


def test_declared_ranges_and_fresh_memory() -> None:
    w = World(check=True)
    a, b, plus = w.device.buffer(256, label="fresh"), w.ints(), w.device.buffer(np.int32(0))
    cb = w.queue.command_buffer()
    e = cb.compute_encoder()
    e.set_pipeline(w.pipelines["copy"])
    e.set_buffer(a, 0, 0)
    e.set_buffer(b, 0, 1, writes=(0, 128))
    e.set_buffer(plus, 0, 2)
    e.dispatch_threadgroups(1, 64)
    e.end_encoding()
    cb.commit()
    assert cb.status == "error"
    with pytest.raises(CheckError) as caught:
        cb.wait_until_completed()
    found = {f.kind: f for f in caught.value.report.findings}
    assert found.keys() == {"uninitialised read", "undeclared write"}
    assert (found["uninitialised read"].label, found["uninitialised read"].count) == ("fresh", 64)
    assert (found["undeclared write"].offset, found["undeclared write"].count) == (128, 32)
    a.write(np.zeros(64, np.int32))
    a.mark_initialised(8, 4, value=False)
    bound = {0: Bound(a), 1: Bound(b), 2: Bound(plus)}
    reports = Recording([Launch(w.pipelines["copy"].kernel, (64, 1, 1), (64, 1, 1), bound)]).run(Run(check=True))
    assert [(f.kind, f.offset, f.count) for f in reports[0].findings] == [("uninitialised read", 8, 1)]


def test_indirect_command_buffers() -> None:
    w = World()
    a = w.ints()
    icb = w.device.indirect_command_buffer(3, max_kernel_buffers=2)
    for k, name in enumerate(["add", "twice", "add"]):
        c = icb.command(k)
        c.set_pipeline(w.pipelines[name])
        c.set_kernel_buffer(a, 0, 0)
        c.set_barrier()
        c.concurrent_dispatch_threadgroups(1, 64)
    for _ in range(2):
        cb = w.queue.command_buffer()
        e = cb.compute_encoder(concurrent=True)
        e.use_resources(a)
        e.execute_commands(icb)
        e.end_encoding()
        cb.commit()
        cb.wait_until_completed()
    assert list(values(a)) == [27] * 64  # ((0 + 3) * 2 + 3 = 9; (9 + 3) * 2 + 3 = 27
    cb = w.queue.command_buffer()
    e = cb.compute_encoder()
    with pytest.raises(LaunchError, match="not resident"):
        e.execute_commands(icb)
    plain = w.device.pipeline(w.pipelines["add"].kernel.library, "twice")
    with pytest.raises(LaunchError, match="without support_indirect_command_buffers"):
        icb.command(0).set_pipeline(plain)
    with pytest.raises(LaunchError, match="made for 2"):
        icb.command(0).set_kernel_buffer(a, 0, 2)
    with pytest.raises(LaunchError, match="cannot be recorded"):
        icb.command(0).set_kernel_buffer(a, 1 << 32, 0)


def test_events_order_command_buffers_and_waits_are_bounded() -> None:
    w = World()
    a, event = w.ints(1), w.device.shared_event()
    cb = w.queue.command_buffer()
    cb.encode_wait_for_event(event, 1)
    e = cb.compute_encoder()
    e.set_pipeline(w.pipelines["add"])
    e.set_buffer(a, 0, 0)
    e.dispatch_threads(1, 1)
    e.end_encoding()
    cb.encode_signal_event(event, 2)
    cb.commit()
    after = w.queue.command_buffer()
    after.commit()
    assert not cb.wait_until_completed(1)
    assert not event.wait_until_signaled(2, 1)
    assert (values(a)[0], after.status) == (0, "committed")
    other = w.device.command_queue().command_buffer()  # another queue may signal it
    other.encode_signal_event(event, 1)
    other.commit()
    assert event.wait_until_signaled(2, 0)
    assert (values(a)[0], cb.status, after.status, event.signaled_value) == (3, "completed", "completed", 2)


def test_a_host_thread_may_signal() -> None:
    w = World()
    event = w.device.shared_event()
    cb = w.queue.command_buffer()
    cb.encode_wait_for_event(event, 5)
    cb.commit()

    def signal() -> None:
        time.sleep(0.01)
        event.signaled_value = 5

    thread = threading.Thread(target=signal)
    thread.start()
    assert cb.wait_until_completed(10_000)
    thread.join()


def test_no_copy_buffers_follow_the_page_rule() -> None:
    w = World()
    memory = mmap.mmap(-1, 32768)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    for length in (0, 100, 16384 + 4096):
        with pytest.raises(LaunchError, match="multiple of the page size"):
            w.device.buffer_no_copy(address, length, keep=memory)
    with pytest.raises(LaunchError, match="page aligned"):
        w.device.buffer_no_copy(address + 8, 16384, keep=memory)
    buffer = w.device.buffer_no_copy(address, 16384, keep=memory, backed=256)
    Recording([Launch(w.pipelines["add"].kernel, (64, 1, 1), (64, 1, 1), {0: Bound(buffer)})]).run()
    assert np.frombuffer(memory, np.int32)[:65].tolist() == [3] * 64 + [0]


def test_limits() -> None:
    w = World()
    a = w.ints(2048)
    cb = w.queue.command_buffer()
    e = cb.compute_encoder()
    e.set_buffer(a, 0, 0)
    with pytest.raises(LaunchError, match="without a pipeline"):
        e.dispatch_threadgroups(1, 1)
    e.set_pipeline(w.pipelines["add"])
    e.dispatch_threadgroups(2, 1024)
    for threads in (1025, (64, 32), 0):
        with pytest.raises(LaunchError, match="1 to 1024 are allowed"):
            e.dispatch_threadgroups(1, threads)
    with pytest.raises(LaunchError, match="31 buffers"):
        e.set_buffer(a, 0, 31)
    with pytest.raises(LaunchError, match="outside a buffer"):
        e.set_buffer(a, 10**6, 0)
    with pytest.raises(LaunchError, match="1 to 4096 are allowed"):
        e.set_bytes(bytes(4097), 2)
    e.set_pipeline(w.pipelines["narrow"])
    assert w.pipelines["narrow"].max_total_threads_per_threadgroup == 64
    with pytest.raises(LaunchError, match="1 to 64 are allowed"):
        e.dispatch_threadgroups(1, 65)
    e.set_pipeline(w.pipelines["copy"])
    with pytest.raises(LaunchError, match=r"y \[\[buffer\(1\)\]\] is not bound"):
        e.dispatch_threadgroups(1, 1)
    e.set_pipeline(w.pipelines["dynamic"])
    with pytest.raises(LaunchError, match="has no length"):
        e.dispatch_threadgroups(1, 64)
    for length, reason in ((24, "multiple of 16"), (32784, "a threadgroup has 32768")):
        e.set_threadgroup_memory_length(length, 0)
        with pytest.raises(LaunchError, match=reason):
            e.dispatch_threadgroups(1, 64)
    e.set_threadgroup_memory_length(256, 0)
    e.dispatch_threadgroups(1, 64)
    with pytest.raises(LaunchError, match="still open"):
        cb.commit()
    with pytest.raises(LaunchError, match="open already"):
        cb.blit_encoder()
    e.end_encoding()
    with pytest.raises(LaunchError, match="ended already"):
        e.end_encoding()
    cb.commit()
    with pytest.raises(LaunchError, match="committed"):
        cb.commit()
    assert cb.wait_until_completed()
    assert values(a)[:64].tolist() == list(range(63, -1, -1))
    for size in (0, w.device.max_buffer_length + 1):
        with pytest.raises(LaunchError, match="a buffer of"):
            w.device.buffer(size)


def test_a_recording_runs_again_with_what_is_in_its_buffers() -> None:
    w = World()
    a = w.ints(4096)
    add = Launch(w.pipelines["add"].kernel, (4096, 1, 1), (64, 1, 1), {0: Bound(a)})
    twice = Launch(w.pipelines["twice"].kernel, (4096, 1, 1), (64, 1, 1), {0: Bound(a)})
    recording = Recording([add, twice, add])
    expected = np.zeros(4096, np.int64)
    for k in range(20):
        recording.run(Run(os_threads=1 + k % 3))
        expected = (expected + 3) * 2 + 3
    np.testing.assert_array_equal(values(a), expected.astype(np.int32))


def test_a_kernel_that_cannot_finish_is_an_error_not_a_hang() -> None:
    device = Device()
    library = device.library(
        """
        kernel void stuck(device int * x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
            if (i < 32) threadgroup_barrier(mem_flags::mem_none);
            else simd_sum(1);
            if (i < 16) threadgroup_barrier(mem_flags::mem_none);
            else if (i < 32) simd_sum(2);
        }
        template<int N> kernel void big(device int * x [[buffer(0)]]) { threadgroup int t[N]; t[0] = 1; x[0] = t[0]; }
        template [[host_name("fits")]] kernel void big<8192>(device int *);
        template [[host_name("too_big")]] kernel void big<8193>(device int *);
    """.replace("kernel void stuck", "#include <metal_stdlib>\nusing namespace metal;\nkernel void stuck", 1)
    )
    x = np.zeros(1, np.int32)
    with pytest.raises(LaunchError, match="wait for each other"):
        library.kernel("stuck")(1, 64, x)
    library.kernel("fits")(1, 1, x)
    assert x[0] == 1
    with pytest.raises(LaunchError, match="threadgroup memory is 32784 bytes or more"):
        library.kernel("too_big")(1, 1, x)
    library.kernel("fits")(1, 1, x)  # the device lives on


def test_arguments_of_a_plain_call() -> None:
    w = World()
    kernel = w.pipelines["copy"].kernel
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    kernel(1, 64, x, y, np.int32(7))
    np.testing.assert_array_equal(y, x + 7)
    with pytest.raises(LaunchError, match="takes 3 buffers"):
        kernel(1, 64, x, y)
    with pytest.raises(LaunchError, match=r"x \[\[buffer\(0\)\]\] is not bound"):
        kernel(1, 64, None, y, np.int32(7))
    with pytest.raises(LaunchError, match="not contiguous"):
        kernel(1, 32, x[::2], y, np.int32(7))
    with pytest.raises(LaunchError, match="is read-only"):
        kernel(1, 64, x, np.frombuffer(bytes(256), np.int32), np.int32(7))
    with pytest.raises(LaunchError, match="list is no buffer"):
        kernel(1, 64, [1], y, np.int32(7))
    with pytest.raises(LaunchError, match="order 'sideways'"):
        kernel(1, 64, x, y, np.int32(7), order="sideways")
    with pytest.raises(MslError, match="no kernel 'cpy'"):
        kernel.library.kernel("cpy")
