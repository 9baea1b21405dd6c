"""What the code of this folder takes for granted of Apple's API and of PyObjC, tried on this machine: the doctor's."""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from minfer.backends.base import Check
from minfer.backends.gpu.devices.metal import self_test
from minfer.backends.gpu.devices.metal.encode import Direct
from minfer.backends.gpu.kernels import FAMILIES
from minfer.backends.gpu.lower.choose import left_out
from minfer.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minfer.backends.gpu.devices.metal import MetalDevice

MIB = 1 << 20
#: Above these a decode step would be slower than the GPU's work: 250 launches are some 1,000 messages.
SLOW_MESSAGE_S, SLOW_WAIT_S = 20e-6, 5e-3
MESSAGES, WAITS = 2000, 50
TIMEOUT_MS = 20


def facts(device: MetalDevice) -> dict[str, str]:
    """The GPU, and the software between it and us."""
    metal, profile = device.metal, device.profile
    families = [n for n in (7, 8, 9) if device.gpu.supportsFamily_(getattr(metal, f"MTLGPUFamilyApple{n}"))]
    return {
        "GPU": device.name,
        "family": f"Apple{families[-1]}{' or later' if families[-1] == 9 else ''}" if families else "none of Apple7 on",
        "macOS": platform.mac_ver()[0],
        "PyObjC": str(device.objc.__version__),
        "buffer": f"up to {profile.max_buffer_bytes:,} bytes",
        "threadgroup": f"{profile.max_threads} threads, {profile.max_threadgroup_bytes:,} bytes",
    }


def run(device: MetalDevice, *, risky: bool) -> Iterator[Check]:
    """Each check by itself: what it raises is a failure of it."""
    for name, check in CHECKS.items():
        try:
            yield check(device)
        except Exception as error:  # PyObjC has errors of its own
            yield Check(name, "fail", f"{type(error).__name__}: {error}")
    try:
        yield _replay(device, risky=risky)
    except Exception as error:
        yield Check("replay", "fail", f"{type(error).__name__}: {error}")


def _references(device: MetalDevice) -> Check:
    """A buffer that Python alone holds has one reference; and memory that nobody holds is given back."""
    device.buffer(16 * MIB, "short-lived")
    before = device.memory()[0]
    for _ in range(8):
        device.buffer(16 * MIB, "short-lived")
    lost = before - device.memory()[0]
    text = f"a new buffer is held {device.references} times; of 8 x 16 MiB, {lost / MIB:.0f} MiB were not given back"
    good = device.references == 1 and lost < 32 * MIB
    return Check("references", "pass" if good else "fail", text, {"references": device.references, "lost": lost})


def _zeroed(device: MetalDevice) -> Check:
    """New memory is zero, also where it was another buffer's before."""
    for _ in range(4):
        dirty = device.buffer(4 * MIB, "dirty")
        device.write(dirty, 0, b"\xff" * (4 * MIB))
        del dirty
    fresh = np.frombuffer(device.read(device.buffer(4 * MIB, "fresh"), 0, 4 * MIB), np.uint8)
    wrong = int(np.count_nonzero(fresh))
    text = f"{wrong:,} of {fresh.size:,} bytes of a new buffer are not zero"
    return Check("new memory", "fail" if wrong else "pass", text)


def _libraries(device: MetalDevice) -> Check:
    """Apple's compiler takes the text of every family that is launched here."""
    seconds = {}
    for family in sorted(set(FAMILIES) - left_out(device.profile)):
        start = time.perf_counter()
        with device.pool():
            device.library(family)
        seconds[family] = time.perf_counter() - start
    slowest = max(seconds, key=lambda family: seconds[family])
    text = f"{len(seconds)} compile in {sum(seconds.values()):.2f} s, {slowest} in {seconds[slowest]:.2f} s"
    return Check("libraries", "pass", text, seconds)


def _direct(device: MetalDevice) -> Check:
    """32 launches that need their barriers, three runs, against numpy."""
    found = self_test.results(device, replay=False)
    bad = 0
    for got, want in zip(found, self_test.expected(), strict=True):
        bad += int((~np.isclose(got.view(np.float32), want, rtol=1e-4, atol=1e-5)).sum())
    total = sum(got.size // 4 for got in found)
    text = f"32 dependent launches, three runs: {bad:,} of {total:,} values differ from numpy's"
    return Check("direct encoding", "fail" if bad else "pass", text, {"different": bad})


def _mapped(device: MetalDevice) -> Check:
    """A kernel reads a file's own pages, mapped read-only: what is written to the file later is what it sees."""
    n, before = self_test.N // 2, 100
    first, second = (np.full(n, value, np.float32) for value in (1.5, -2.25))
    x, out = device.buffer(4 * n, "x"), device.buffer(4 * n, "out")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(before) + first.tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        wrapped, offset = device.wrap(address + before, 4 * n, mapped, "a mapped file")
        found = []
        for values in (first, second):
            os.pwrite(file.fileno(), values.tobytes(), before)
            Direct(device, [self_test.add(wrapped, offset, x, out)], keep=False).run()
            found.append(np.frombuffer(device.read(out, 0, 4 * n), np.float32))
    if not np.array_equal(found[0], first):
        return Check("mapped memory", "fail", f"a kernel reads {found[0][0]} from a file that holds {first[0]}")
    if not np.array_equal(found[1], second):
        text = f"a kernel reads {found[1][0]} where the file now holds {second[0]}: Metal made a copy"
        return Check("mapped memory", "fail", text)
    return Check("mapped memory", "pass", "a file mapped read-only is read in place, without a copy")


def _message(device: MetalDevice) -> Check:
    """What a message to an object costs."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(MESSAGES):
            device.gpu.hasUnifiedMemory()
        rounds.append((time.perf_counter() - start) / MESSAGES)
    cost = statistics.median(rounds)
    text = f"{1e6 * cost:.2f} us; a launch takes four or five, a replayed step 14"
    if cost > SLOW_MESSAGE_S:
        text += f". Above {1e6 * SLOW_MESSAGE_S:.0f} us the host is slower than the GPU"
    return Check("message", "fail" if cost > SLOW_MESSAGE_S else "pass", text, {"seconds": cost})


def _wait(device: MetalDevice) -> Check:
    """What sending a command buffer with nothing in it, and waiting for its event, costs."""
    waits, late = [], 0
    for _ in range(WAITS):
        start = time.perf_counter()
        device.submit(lambda commands: None, "an empty command buffer", None)
        device.synchronize()
        waits.append(time.perf_counter() - start)
        late += bool(device.late)
    cost = statistics.median(waits)
    text = f"{1e6 * cost:.0f} us for an empty command buffer, {1e6 * max(waits):.0f} us at most; "
    text += f"{late} of {WAITS} had no last status yet"
    if cost > SLOW_WAIT_S:
        text += f". Above {1e3 * SLOW_WAIT_S:.0f} ms a step waits longer than it runs"
    values = {"seconds": cost, "most": max(waits), "late": late}
    return Check("event wait", "fail" if cost > SLOW_WAIT_S else "pass", text, values)


def _bounded(device: MetalDevice) -> Check:
    """A wait for what never comes ends when it should."""
    start = time.perf_counter()
    signaled = device.wait_for_nothing(TIMEOUT_MS)
    seconds = time.perf_counter() - start
    text = f"{1e3 * seconds:.1f} ms of a bound of {TIMEOUT_MS} ms, answer {bool(signaled)}"
    good = not signaled and 0.5 * TIMEOUT_MS <= 1e3 * seconds <= 1000
    return Check("bounded wait", "pass" if good else "fail", text, {"seconds": seconds})


def _residency(device: MetalDevice) -> Check:
    if device.resident:
        return Check("residency set", "pass", "there")
    text = f"none: macOS {platform.mac_ver()[0]} or this GPU has none; weights may be paged out between steps"
    return Check("residency set", "skip", text)


def _counters(device: MetalDevice) -> Check:
    """A launch of twice the work takes longer by the GPU's clock, and none is longer than the whole."""
    buffers = [device.buffer(4 * self_test.N, f"counted {i}") for i in range(4)]
    steps = self_test.steps(buffers)
    start = time.perf_counter()
    try:
        seconds = device.times(steps)
    except UnsupportedError as error:
        return Check("launch times", "skip", f"the host's clock is used: {error}")
    whole = time.perf_counter() - start
    text = f"{1e6 * statistics.median(seconds):.1f} us, the median of {len(seconds)} small launches"
    if not all(s > 0 for s in seconds) or sum(seconds) > whole:
        text += f"; {1e6 * sum(seconds):.1f} us of launches in {1e6 * whole:.1f} us: the clock is not in seconds"
        return Check("launch times", "fail", text)
    return Check("launch times", "pass", text, {"seconds": statistics.median(seconds)})


def _replay(device: MetalDevice, *, risky: bool) -> Check:
    """An indirect command buffer, with its barriers, gives the bits of direct encoding."""
    if (reason := device.replayable()) and not risky:
        text = f"not tried: {reason}. With your work saved: minfer doctor --device metal --replay"
        return Check("replay", "skip", text)
    found = self_test.tried(device)
    text = "32 dependent launches, three runs: the bits of direct encoding"
    return Check("replay", "pass", text) if found == "same" else Check("replay", "fail", f"the self-test {found}")


CHECKS: dict[str, Callable[[MetalDevice], Check]] = {
    "references": _references,
    "new memory": _zeroed,
    "libraries": _libraries,
    "direct encoding": _direct,
    "mapped memory": _mapped,
    "message": _message,
    "event wait": _wait,
    "bounded wait": _bounded,
    "residency set": _residency,
    "launch times": _counters,
}
