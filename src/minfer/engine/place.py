"""Where a model runs, and what that takes of each device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minfer.backends import AUTO, HOST, open_backend
from minfer.errors import DeviceMemoryError, RequestError, UnsupportedError
from minfer.graph import GraphParams, Placement
from minfer.graph.allocate import Allocator
from minfer.graph.assign import assign
from minfer.graph.plan import make_plan
from minfer.quants import kv_format as parse_kv_format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minfer.backends.base import Backend
    from minfer.graph import Plan, Weight
    from minfer.models import Transformer

#: Tokens of a prompt that go through the graph at a time.
N_BATCH = 512


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one device's memory: weights it must hold, KV rows of its layers, buffers of the largest step, and what
    its kernels need besides."""

    device: str
    weights: int
    kv: int
    buffers: int
    scratch: int
    n_ctx: int
    kv_format: str

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers + self.scratch

    def check(self, memory: tuple[int, int] | None) -> None:
        """Raise `DeviceMemoryError` with all the numbers. What a device does not tell is not compared."""
        if memory is None or self.total <= memory[0]:
            return
        raise DeviceMemoryError(
            f"{self.device} has {memory[0]:,} bytes free of {memory[1]:,}; the model needs {self.total:,}: "
            f"weights {self.weights:,}, KV cache {self.kv:,} ({self.n_ctx:,} cells of {self.kv_format}), buffers "
            f"{self.buffers:,}, scratch {self.scratch:,}. Ask for a smaller context (n_ctx), a smaller KV format, "
            "fewer layers on it (gpu_layers), or a smaller model"
        )


def weights_on(plan: Plan, device: str) -> set[Weight]:
    """The weights that nodes of a device name."""
    return {weight for node in plan.graph for weight in node.weights if node.device == device}


def need(backend: Backend, arch: Transformer, plan: Plan, n_ctx: int) -> Need:
    """What `plan`, a full batch, takes of a backend's device."""
    name, params = backend.name, plan.params
    row = parse_kv_format(params.kv_format).row_bytes(arch.n_kv_head * arch.head_dim)
    return Need(
        name,
        sum(map(backend.weight_bytes, weights_on(plan, name))),
        2 * params.placement.layers.count(name) * n_ctx * row,
        sum({s.buffer: s.nbytes for s in plan.slots.values() if s.device == name}.values()),
        backend.scratch_bytes(plan, n_ctx),
        n_ctx,
        params.kv_format,
    )


def split_placement(device: str, host: str, n_layers: int, on_device: int) -> Placement:
    """The first `on_device` layers and the embedding on `device`, the rest on `host`; none is all on `host`."""
    if not on_device:
        return Placement.whole(host, n_layers)
    layers = (device,) * on_device + (host,) * (n_layers - on_device)
    return Placement(device, layers, layers[-1])


def place(
    arch: Transformer,
    device: str,
    kv_format: str,
    *,
    gpu_layers: int | str | None = None,
    n_ctx: int | None = None,
) -> Placement:
    """Where `arch` runs. `auto` is the best device that supports the whole model; a device named runs it or refuses.

    `gpu_layers` puts that many layers on the device and the rest on the host; "auto" takes the longest prefix that fits
    the device's memory with a context of `n_ctx`, all of it where the memory is unknown.
    Raises `UnsupportedError` with each device's reason where none can.
    """
    reasons = []
    for name in AUTO if device == "auto" else (device,):
        needed = (name,) if gpu_layers is None else dict.fromkeys((name, HOST))
        backends: dict[str, Backend] = {}
        try:
            for needs in needed:
                backends[needs] = open_backend(needs, kv_format)  # refuses where this machine has none
            whole = Placement.whole(name, arch.n_layer)
            assign(arch.build(GraphParams(1, 1, whole, kv_format)), backends)
            if gpu_layers is None or (name == HOST and gpu_layers in ("auto", 0)):
                return whole
            if name == HOST:
                raise RequestError(f"gpu_layers is {gpu_layers!r}, but {name} is no GPU; name one with device")
            if gpu_layers == "auto":
                return _longest(arch, backends, name, kv_format, n_ctx or arch.n_ctx_train)
            if not isinstance(gpu_layers, int) or not 0 <= gpu_layers <= arch.n_layer:
                raise RequestError(f"gpu_layers is {gpu_layers!r}; expected 0 to {arch.n_layer} or auto")
            return split_placement(name, HOST, arch.n_layer, gpu_layers)
        except UnsupportedError as error:
            if device != "auto":
                raise
            reasons.append(f"{name}: {error}")
        finally:
            for backend in backends.values():
                backend.close()
    raise UnsupportedError("no device here runs this model:\n  " + "\n  ".join(reasons))


def _longest(arch: Transformer, backends: Mapping[str, Backend], device: str, kv_format: str, n_ctx: int) -> Placement:
    """The longest prefix of layers that fits; with an unknown memory, all of them."""
    known = backends[device].memory()
    options: Sequence[int] = range(arch.n_layer, 0, -1) if known else (arch.n_layer,)
    for count in options:
        placement = split_placement(device, HOST, arch.n_layer, count)
        params = GraphParams(min(N_BATCH, n_ctx), 1, placement, kv_format)
        plan = make_plan(arch.build, params, backends, Allocator(backends))
        if known is None or need(backends[device], arch, plan, n_ctx).total <= known[0]:
            return placement
    return split_placement(device, HOST, arch.n_layer, 0)
