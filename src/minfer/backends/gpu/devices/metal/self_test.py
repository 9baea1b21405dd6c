"""Whether a replay gives the bits of direct encoding on this machine: tried once, the verdict is kept on disk."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import minfer
from minfer.backends.gpu import args
from minfer.backends.gpu.devices.base import Bound, Step
from minfer.backends.gpu.devices.metal.encode import Direct, Replay
from minfer.backends.gpu.launch import Binding, Launch, Ref, barriers
from minfer.errors import DeviceError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from minfer.backends.gpu.devices.metal import MetalDevice

#: Values in each buffer of the self-test, and threads of a threadgroup.
N, THREADS = 16384, 256
LAUNCHES = 32
ADD, MULTIPLY, SILU = 4, 5, 0  # operations of elementwise.metal
WAIT_S = 10.0


def decide(device: MetalDevice) -> bool:
    """Whether recordings are replayed. `MINFER_METAL_REPLAY` is 0 for never, 1 for an attempt on any GPU (or an error).

    Unset, a GPU of the family Apple9 or later replays once the self-test passed.
    """
    wish = os.environ.get("MINFER_METAL_REPLAY", "")
    if wish not in ("", "0", "1"):
        raise RequestError(f"MINFER_METAL_REPLAY is 0 or 1, not {wish!r}")
    if wish == "0" or (wish == "" and device.replayable()):
        return False
    found = _read().get(_key(device))
    if found == "same":
        return True
    if found is None or wish == "1":
        found = tried(device)
        if found != "same":
            print(f"minfer: replay stays off on {device.name}: the self-test {found}", file=sys.stderr)
    if found != "same" and wish == "1":
        raise UnsupportedError(f"MINFER_METAL_REPLAY=1: on {device.name} the self-test {found}; unset it")
    return found == "same"


def tried(device: MetalDevice) -> str:
    """The verdict of an attempt made now, on a device of its own, and kept on disk."""
    # Should the attempt take the process down, the next one finds this and leaves replay alone.
    _write(_read() | {_key(device): "did not end"})
    found = attempt(type(device)(wait_s=WAIT_S))
    _write(_read() | {_key(device): found})
    return found


def _key(device: MetalDevice) -> str:
    return f"{device.name} | macOS {platform.mac_ver()[0]} | minfer {minfer.__version__}"


def attempt(device: MetalDevice) -> str:
    """`same`, or what is wrong. The device is used up: a fault in it is the verdict, and nobody else's."""
    try:
        with_direct, with_replay = results(device, replay=False), results(device, replay=True)
    except DeviceError as error:
        return f"failed: {error}"
    finally:
        device.close()
    different = sum(int((a != b).sum()) for a, b in zip(with_direct, with_replay, strict=True))
    return f"found {different} of {sum(a.size for a in with_direct)} bytes different" if different else "same"


def results(device: MetalDevice, *, replay: bool) -> list[Any]:
    """Three runs of a chain of launches, each with inputs of its own: what is in every buffer afterwards, as bytes."""
    buffers = [device.buffer(4 * N, f"self-test {i}") for i in range(4)]
    chain = steps(buffers)
    program = Replay(device, chain) if replay else Direct(device, chain, keep=True)
    found = []
    for run in range(3):
        for i, buffer in enumerate(buffers):
            device.write(buffer, 0, _inputs(run, i).tobytes())
        program.run()
        found += [np.frombuffer(device.read(buffer, 0, 4 * N), np.uint8) for buffer in buffers]
    return found


def expected() -> list[npt.NDArray[np.float32]]:
    """The same by numpy."""
    found = []
    for run in range(3):
        buffers = [_inputs(run, i) for i in range(4)]
        for i in range(LAUNCHES):
            x, y = buffers[i % 4][N // 2 :], buffers[(i + 1) % 4][: N // 2]
            z = (x + y, x * y, x / (1 + np.exp(-x)))[i % 3]
            buffers[(i + 2) % 4][: N // 2] = z
        found += buffers
    return found


def _inputs(run: int, buffer: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng([run, buffer]).standard_normal(N, np.float32)


def steps(buffers: list[Any]) -> list[Step]:
    """Launches that need their barriers: each reads, element by element shifted by half a buffer, what others wrote."""
    launches = []
    for i in range(LAUNCHES):
        operation = (ADD, MULTIPLY, SILU)[i % 3]
        x, y, z = i % 4, (i + 1) % 4, (i + 2) % 4
        half = 2 * N
        bindings = [Binding(1, Ref("pool", x), half, 2 * half), Binding(3, Ref("pool", z), 0, half, "write")]
        if operation != SILU:
            bindings.insert(1, Binding(2, Ref("pool", y), 0, half))
        launches.append(_launch(f"self-test {i}", operation, bindings))
    found = []
    for launch, fence in zip(launches, barriers(launches), strict=True):
        bound = [
            Bound(b.slot, buffers[int(b.ref.key)], b.start, 0, b.end - b.start, not b.writes, b.writes)
            for b in launch.bindings
        ]
        found.append(Step(launch, tuple(bound), fence))
    return found


def add(x: Any, offset: int, y: Any, z: Any) -> Step:
    """z = y + what lies `offset` bytes into x, of N / 2 values."""
    places = ((1, x, offset, False), (2, y, 0, False), (3, z, 0, True))
    bound = tuple(Bound(slot, buffer, at, 0, 2 * N, not out, out) for slot, buffer, at, out in places)
    return Step(_launch("addition", ADD, []), bound, False)


def _launch(node: str, operation: int, bindings: list[Binding]) -> Launch:
    return Launch(
        node=node,
        family="elementwise",
        kernel="elementwise",
        constants=(("operation", operation), ("is_binary", operation != SILU)),
        struct=args.ELEMENTWISE.name,
        args=args.ELEMENTWISE.pack(n=N // 2, factor=1.0),
        bindings=tuple(bindings),
        grid=(N // 2 // THREADS, 1, 1),
        threads=THREADS,
        bytes=0,
        flops=0,
    )


def _path() -> Path:
    base = os.environ.get("MINFER_CACHE") or Path.home() / "Library" / "Caches" / "minfer"
    return Path(base) / "metal-replay.json"


def _read() -> dict[str, str]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _write(verdicts: dict[str, str]) -> None:
    """Without a place to write, the self-test runs again in the next process."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        _path().write_text(json.dumps(verdicts, indent=2), encoding="utf-8")
    except OSError as error:
        print(f"minfer: the verdict on replay is not kept: {error}", file=sys.stderr)
