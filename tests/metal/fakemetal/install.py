"""The modules `objc`, `Metal` and `Foundation`, put where `import` finds them for the length of a `with` block."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from typing import TYPE_CHECKING, Any

from .contract import version
from .device import Device
from .objects import CaptureManager, ConstantValues, Descriptor, PassDescriptor, Url
from .runtime import Instance, Runtime, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULE = "minfer.backends.gpu.devices.metal"


class ClassObject:
    """An Objective-C class: `alloc().init()`, `new()`, and the contract's class methods."""

    def __init__(self, runtime: Runtime, owner: str) -> None:
        self._runtime, self._owner = runtime, owner
        self._manager: CaptureManager | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        runtime, owner = self._runtime, self._owner
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "alloc":
            runtime.messages["alloc"] += 1
            return lambda: _Allocated(self)
        if name == "new":
            return lambda: self._made(messages=1)
        method = runtime.method(owner, name, class_method=True)

        def send(*given: Any) -> Any:
            runtime.messages[method.selector] += 1
            values = runtime.arguments(method, given)
            if owner == "NSURL":
                return answer(runtime, method, Url(runtime, values[0]))
            if name == "computePassDescriptor":
                return answer(runtime, method, PassDescriptor(runtime))
            if name == "sharedCaptureManager":
                self._manager = self._manager or CaptureManager(runtime)
                return self._manager.proxy()
            raise runtime.fail(f"{method.name}: the fake does not have it")

        return send

    def _made(self, messages: int) -> Any:
        self._runtime.messages["init"] += messages
        kind = ConstantValues if self._owner == "MTLFunctionConstantValues" else Descriptor
        methods = self._runtime.contract.owners[self._owner]["methods"].values()
        since = min(version(m["macos"]) for m in methods if m["macos"])
        if since > self._runtime.macos:
            raise self._runtime.fail(f"{self._owner} came with macOS {since}")
        instance: Instance = kind(self._runtime, self._owner)
        proxy = instance.proxy()
        instance.release()
        return proxy


class _Allocated:
    def __init__(self, owner: ClassObject) -> None:
        self._class = owner

    def init(self) -> Any:
        return self._class._made(messages=1)


class MetalModule(types.ModuleType):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__("Metal")
        self._runtime = runtime
        self._classes: dict[str, ClassObject] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        runtime = self._runtime
        if name == "MTLCreateSystemDefaultDevice":
            return self._device
        if runtime.contract.is_class(name):
            return self._classes.setdefault(name, ClassObject(runtime, name))
        return "timestamp" if name == "MTLCommonCounterSetTimestamp" else runtime.constant(name)

    def _device(self) -> Any:
        runtime = self._runtime
        if runtime.faults.no_device:
            return None
        if runtime.device is None:
            runtime.device = Device(runtime)
        return runtime.device.proxy()


@contextlib.contextmanager
def installed(runtime: Runtime, *, strict: bool = True) -> Iterator[Runtime]:
    """`import objc, Metal, Foundation` gives the fake. At the end `strict` raises what was found, caught or not,
    and names every object that is still held."""
    objc = types.ModuleType("objc")
    objc.__dict__.update(
        registerMetaDataForSelector=runtime.register_metadata,
        autorelease_pool=runtime.autorelease_pool,
        macos_available=runtime.macos_available,
        __version__="12.2.2",
    )
    metal = MetalModule(runtime)
    foundation = types.ModuleType("Foundation")
    foundation.__dict__["NSURL"] = ClassObject(runtime, "NSURL")
    modules = {"objc": objc, "Metal": metal, "Foundation": foundation}
    ours = [name for name in sys.modules if name == MODULE or name.startswith(f"{MODULE}.")]
    before = {name: sys.modules.pop(name, None) for name in (*modules, *ours)}
    sys.modules.update(modules)
    try:
        yield runtime
    finally:
        for name in [n for n in sys.modules if n in modules or n == MODULE or n.startswith(f"{MODULE}.")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if module is not None})
        package = sys.modules.get("minfer.backends.gpu.devices")
        if package is not None and hasattr(package, "metal"):
            delattr(package, "metal")
    if strict:
        gc.collect()
        if any(view() is not None for view, _ in runtime.stale):
            raise runtime.fail("memory of a released buffer is still reachable from Python")
        if runtime.errors:
            raise runtime.errors[0]
        held = sorted(f"{i.owner} ({i.count})" for i in runtime.alive if not i.shared)
        if held:
            raise runtime.fail(f"never released: {', '.join(held)}")
