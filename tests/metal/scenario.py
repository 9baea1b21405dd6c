"""One short run through everything that the Metal device does, with results known from numpy."""

from __future__ import annotations

import importlib.util
import mmap
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fakemetal.install import MODULE

from minfer.backends.gpu import args
from minfer.backends.gpu.devices.base import Bound, Step
from minfer.backends.gpu.launch import Launch

if TYPE_CHECKING:
    import numpy.typing as npt

N = 512
SCALE, ADD, MULTIPLY = 2, 4, 5  # in elementwise.metal
FOLDER = Path(__file__).parents[2] / "src" / "minfer" / "backends" / "gpu" / "devices" / "metal"


def step(operation: int, x: Any, y: Any, z: Any, *, barrier: bool, x_offset: int = 0, factor: float = 1.0) -> Step:
    """z = x + y, x * y or (without y) x * factor, of N values."""
    launch = Launch(
        node=f"operation {operation}",
        family="elementwise",
        kernel="elementwise",
        constants=(("operation", operation), ("is_binary", y is not None)),
        struct=args.ELEMENTWISE.name,
        args=args.ELEMENTWISE.pack(n=N, factor=factor),
        bindings=(),
        grid=(N // 256, 1, 1),
        threads=256,
        bytes=0,
        flops=0,
    )
    size = 4 * N
    bound = [Bound(1, x, x_offset, 0, size, True, False), Bound(3, z, 0, 0, size, False, True)]
    if y is not None:
        bound.append(Bound(2, y, 0, 0, size, True, False))
    return Step(launch, tuple(bound), barrier)


def values(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(N, np.float32)


def exercise(device: Any) -> None:
    """Buffers, a mapped file's memory, copies, direct encoding, and a recording run twice with new inputs."""
    mapped = mmap.mmap(-1, 3 * 16384)
    weights = np.frombuffer(mapped, np.float32)
    weights[25 : 25 + N] = values(1)
    wrapped, offset = device.wrap(weights.ctypes.data + 100, 4 * N, mapped, "weights")
    x, y, z, w = (device.buffer(4 * N, name) for name in "xyzw")
    steps = [
        step(ADD, wrapped, x, y, barrier=False, x_offset=offset),
        step(MULTIPLY, y, x, z, barrier=True),
        step(ADD, z, y, w, barrier=True),
        step(SCALE, w, None, w, barrier=True, factor=0.5),
    ]

    def want(given: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        first = values(1) + given
        return (first * given + first) * np.float32(0.5)

    device.write(x, 0, values(2).tobytes())
    device.encode(steps)
    assert np.array_equal(np.frombuffer(device.read(w, 0, 4 * N), np.float32), want(values(2)))
    recording = device.record(steps)
    for seed in (3, 4):
        device.write(x, 0, values(seed).tobytes())
        recording.run()
        device.copy(w, 0, z, 0, 4 * N)
        device.write(x, 0, bytes(4 * N))  # waits: the step before reads x
        assert np.array_equal(np.frombuffer(device.read(z, 0, 4 * N), np.float32), want(values(seed)))
    device.close()


def load(folder: Path) -> Any:
    """The Metal device's package from a folder, under its own name."""
    spec = importlib.util.spec_from_file_location(
        MODULE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module


def mutated(target: Path, file: str, old: str, new: str) -> Any:
    """The package with one place of its text changed. The text must be there exactly as said."""
    shutil.copytree(FOLDER, target, ignore=shutil.ignore_patterns("__pycache__"))
    text = (target / file).read_text()
    assert old in text, f"{file} has no {old!r} any more: change this test with it"
    (target / file).write_text(text.replace(old, new))
    return load(target)
