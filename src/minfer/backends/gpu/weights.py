"""Where each weight lies on a device: in the mapped file itself on unified memory, else in one uploaded copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.backends.base import Bytes, Progress, Tensors
    from minfer.backends.gpu.devices.base import Device
    from minfer.graph.ir import Weight

#: Byte alignment of a weight in an uploaded buffer.
ALIGNMENT = 256


def register(
    device: Device, tensors: Tensors, weights: Sequence[Weight], progress: Progress | None = None
) -> dict[str, tuple[Any, int]]:
    """Weight name -> (buffer, byte offset). No buffer is larger than the device allows for one; `progress` is told of
    what is uploaded."""
    arrays = {weight.name: tensors.data(weight.name) for weight in weights}
    limit = device.profile.max_buffer_bytes
    if device.profile.unified_memory:
        return _wrapped(device, arrays, limit)
    return _uploaded(device, arrays, limit, progress or (lambda done, total, what: None))


def _owner(array: Any) -> Any:
    """What holds the memory of an array: the mapped file of a model."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def _wrapped(device: Device, arrays: dict[str, Bytes], limit: int) -> dict[str, tuple[Any, int]]:
    """One buffer over each run of weights that share a mapping and fit the limit together."""
    spans = []
    for name, array in arrays.items():
        assert array.flags.c_contiguous, name
        spans.append((id(_owner(array)), array.ctypes.data, array.nbytes, name))
    runs: list[list[tuple[int, int, int, str]]] = []
    for span in sorted(spans):
        owner, address, nbytes, _ = span
        # A page at either end may be added to the run.
        if runs and runs[-1][0][0] == owner and address + nbytes - runs[-1][0][1] + (1 << 16) <= limit:
            runs[-1].append(span)
        else:
            runs.append([span])
    found: dict[str, tuple[Any, int]] = {}
    for run in runs:
        start = run[0][1]
        end = max(address + nbytes for _, address, nbytes, _ in run)
        keep = [arrays[name] for _, _, _, name in run]
        buffer, offset = device.wrap(start, end - start, keep, f"weights from {run[0][3]}")
        for _, address, _, name in run:
            found[name] = (buffer, offset + address - start)
    return found


def _uploaded(device: Device, arrays: dict[str, Bytes], limit: int, progress: Progress) -> dict[str, tuple[Any, int]]:
    """Weights side by side in buffers of up to the limit, each copied once."""
    groups: list[tuple[int, dict[str, int]]] = []
    for name, array in arrays.items():
        size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if not groups or groups[-1][0] + size > limit:
            groups.append((0, {}))
        used, offsets = groups[-1]
        offsets[name] = used
        groups[-1] = (used + size, offsets)
    found: dict[str, tuple[Any, int]] = {}
    done, total = 0, sum(array.nbytes for array in arrays.values())
    for used, offsets in groups:
        buffer = device.buffer(used, "weights")
        for name, offset in offsets.items():
            progress(done, total, f"uploading weights to {device.profile.name}")
            device.write(buffer, offset, np.ascontiguousarray(arrays[name]).reshape(-1).data)
            done += arrays[name].nbytes
            found[name] = (buffer, offset)
    return found
