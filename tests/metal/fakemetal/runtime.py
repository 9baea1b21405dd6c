"""The Objective-C runtime as PyObjC shows it: retain counts, messages checked against the contract, pools."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .contract import CONSTANT_SINCE, NULLABLE, Argument, Contract, ContractError, Method, Version, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minfer.msl.device import Device

MTLSize = namedtuple("MTLSize", "width height depth")

#: The oldest macOS that minfer runs on: what came later must be asked for before it is used.
FLOOR: Version = (14,)
UNSIGNED, SIGNED = (0, 2**64 - 1), (-(2**63), 2**63 - 1)
RANGES = {"Q": UNSIGNED, "I": (0, 2**32 - 1), "q": SIGNED, "i": (-(2**31), 2**31 - 1), "z": (0, 255)}


@dataclass
class Faults:
    """What goes wrong, when it should. `fail_at` and `hang_at` count committed command buffers, from 1."""

    fail_at: int = 0
    fail_text: str = "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
    fail_code: int = 3
    fail_signals: bool = False
    hang_at: int = 0
    late_status: int = 0  # how often a finished command buffer still says "scheduled"
    memory: int = 1 << 36  # bytes of the GPU
    no_device: bool = False
    vanish_at: int = 0  # from this command buffer on, the queue gives none
    broken_source: str = ""  # text put before every library
    corrupt_replay: bool = False
    no_residency: bool = False
    no_mapping: bool = False
    no_reason: bool = False  # a failed command buffer without an error object
    pipeline: str = ""  # why no pipeline is made
    copies_mapping: bool = False  # memory that should be mapped is copied
    dirty_memory: bool = False  # a new buffer holds what another had
    no_sampling: bool = False  # counters are not sampled at the ends of an encoder
    no_counters: bool = False
    no_sample_buffer: bool = False
    no_samples: bool = False  # samples are errors
    wait_s: float = 1e-4  # how long a wait for a finished command buffer takes
    timeout_factor: float = 1.0  # how long a wait that ends unsignaled takes, in its own bound
    message_s: float = 2e-6
    ticks_per_second: float = 24e6
    capture: str = ""  # why no capture starts; "destination" is that traces are not allowed


@dataclass
class Runtime:
    """One pretended Mac: its macOS, its GPU, its PyObjC; and what was sent to it."""

    macos: Version = (15, 0)
    family: int = 1009  # the highest Apple GPU family: M3
    unified: bool = True
    metal3: bool = True
    name: str = "Apple M3 (pretended)"
    over_retains: bool = True  # PyObjC up to 12.2.2
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        from minfer.msl.device import Device as SoftwareDevice

        self.macos = plain(self.macos)
        self.contract = Contract()
        self.software: Device = SoftwareDevice()
        self.messages: Counter[str] = Counter()
        self.errors: list[ContractError] = []
        self.alive: set[Instance] = set()
        self.checked: set[str] = set()
        self.checked_version: Version = FLOOR
        self.metadata: dict[str, dict[str, Any]] = {}
        self.pools: list[list[Instance]] = []
        self.allocated = self.committed = 0
        self.time = 1000.0  # seconds, of the host and of the GPU alike; it goes on with what is sent and waited for
        self.residency: list[Instance] = []
        self.captures: list[str] = []
        self.device: Instance | None = None
        self.in_flight: list[Any] = []
        self.stale: list[tuple[Any, Any]] = []  # views of released buffers, and the (poisoned) memory

    def fail(self, text: str) -> ContractError:
        """A finding: raised here, and kept for the end of the test should somebody catch it."""
        error = ContractError(text)
        self.errors.append(error)
        return error

    def shuffle(self, seed: int) -> None:
        """Launches that no barrier orders run in any order from now on."""
        from minfer.msl.recording import Run

        self.software.run = Run(order="shuffled", seed=seed)

    def drain(self) -> None:
        """Run what was committed, in order, up to one that never ends."""
        while self.in_flight and self.in_flight[0].number != self.faults.hang_at:
            buffer = self.in_flight.pop(0)
            buffer.run()
            buffer.release()

    def ticks(self) -> int:
        return round(self.time * self.faults.ticks_per_second)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def sent(self) -> int:
        return sum(self.messages.values())

    # --- selectors -----------------------------------------------------------------------------------------------

    def method(self, owner: str, python_name: str, *, class_method: bool) -> Method:
        """What a Python attribute of an object stands for. AttributeError as on a Mac that does not have it."""
        selector = python_name.replace("_", ":")
        if selector.startswith(":"):
            raise AttributeError(python_name)
        found = self.contract.method(owner, selector)
        if found is None or (found.class_method != class_method and found.owner != "NSObject"):
            self.errors.append(ContractError(f"{owner} has no method {selector!r}"))
            raise AttributeError(f"'{owner}' object has no attribute '{python_name}'")
        if found.since > self.macos:
            self.errors.append(ContractError(f"{found.name} needs macOS {found.since}, this is {self.macos}"))
            raise AttributeError(f"'{owner}' object has no attribute '{python_name}'")
        if found.since > FLOOR and found.since > self.checked_version and selector not in self.checked:
            raise self.fail(f"{found.name} came with macOS {found.since}; nothing asked whether it is there")
        if found.deprecated and found.deprecated <= FLOOR:
            raise self.fail(f"{found.name} is deprecated since macOS {found.deprecated}")
        return found

    # --- arguments -----------------------------------------------------------------------------------------------

    def arguments(self, method: Method, given: tuple[Any, ...]) -> list[Any]:
        """Check what was passed; returns what the method gets."""
        if len(given) != len(method.arguments):
            raise self.fail(f"{method.name} takes {len(method.arguments)} arguments, {len(given)} given")
        for i, (argument, value) in enumerate(zip(method.arguments, given, strict=True)):
            try:
                self._argument(f"{method.name} argument {i + 1}", method, i, argument, value, given)
            except ContractError as error:
                if error not in self.errors:
                    self.errors.append(error)
                raise
        return [value for a, value in zip(method.arguments, given, strict=True) if a.mode != "o"]

    def _argument(
        self, what: str, method: Method, index: int, argument: Argument, value: Any, given: tuple[Any, ...]
    ) -> None:
        kind = argument.kind
        if argument.mode == "o":
            if value is not None:
                raise ContractError(f"{what} is an out-parameter: pass None, the value is in the returned tuple")
        elif kind in RANGES:
            low, high = RANGES[kind]
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ContractError(f"{what} is {argument.declared} in [{low}, {high}], not {value!r}")
            self.contract.check_enum(what, argument.declared, value)
        elif kind == "Z":
            if not isinstance(value, bool):
                raise ContractError(f"{what} is BOOL, not {value!r}")
        elif kind == "d":
            if not isinstance(value, float):
                raise ContractError(f"{what} is a double, not {value!r}")
        elif kind == "{MTLSize=QQQ}":
            self._numbers(what, value, 3)
        elif kind == "{_NSRange=QQ}":
            self._numbers(what, value, 2)
        elif kind == "@":
            self._object(what, (method.selector, index), argument.declared, value)
        elif kind == "@?":
            if value is not None and not callable(value):
                raise ContractError(f"{what} is a block, not {value!r}")
        elif kind == ":":
            if not isinstance(value, (str, bytes)):
                raise ContractError(f"{what} is a selector, not {value!r}")
        elif kind in ("^@", "^Q") and argument.mode == "n":
            wanted = _count(method, given)
            if not isinstance(value, (list, tuple)) or len(value) < wanted:
                raise ContractError(f"{what} is an array of {wanted} items, not {value!r:.80}")
            for item in value[:wanted]:
                if kind == "^Q":
                    self._numbers(what, (item,), 1)
                elif item is not None or "_Nullable" not in argument.declared:
                    self._object(what, ("", 0), argument.declared.split(" ")[0], item)
        elif kind == "^v" and argument.mode == "n":
            try:
                raw = memoryview(value).cast("B")
            except TypeError:
                raise ContractError(f"{what} is bytes-like, not {type(value).__name__}") from None
            if raw.nbytes < given[index + 1]:
                raise ContractError(f"{what}: requesting buffer of {given[index + 1]}, have buffer of {raw.nbytes}")
        elif kind == "^v":
            if not isinstance(value, int) or value < 4096:
                raise ContractError(f"{what} is an address as a number, not {type(value).__name__}")
        elif kind == "^@":
            if value is not None:
                raise ContractError(f"{what}: only None can be passed")
        else:
            raise ContractError(f"{what}: the fake does not know the type {kind}")

    def _numbers(self, what: str, value: Any, count: int) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != count:
            raise ContractError(f"{what} is a struct of {count} numbers, not {value!r}")
        if any(not isinstance(v, int) or not 0 <= v < 2**64 for v in value):
            raise ContractError(f"{what} holds unsigned integers, not {value!r}")

    def _object(self, what: str, key: tuple[str, int], declared: str, value: Any) -> None:
        if value is None:
            if key not in NULLABLE:
                raise ContractError(f"{what} must not be nil")
        elif declared.startswith("NSString"):
            if not isinstance(value, str):
                raise ContractError(f"{what} is a string, not {value!r}")
        elif declared == "id":
            if not isinstance(value, Proxy):
                raise ContractError(f"{what} is an object, not {value!r}")
        else:
            wanted = declared.split("<")[1].split(">")[0] if declared.startswith("id<") else declared.rstrip(" *")
            if not isinstance(value, Proxy):
                raise ContractError(f"{what} is {wanted}, not {value!r:.60}")
            instance = value.instance
            instance.check_alive()
            if not self.contract.conforms(instance.owner, wanted):
                raise ContractError(f"{what} is {wanted}, not {instance.owner}")

    # --- modules' functions --------------------------------------------------------------------------------------

    def constant(self, name: str) -> int:
        found = self.contract.constant(name)
        if found is None or CONSTANT_SINCE.get(name, (0,)) > self.macos:
            self.errors.append(ContractError(f"Metal has no {name}"))
            raise AttributeError(name)
        return found

    def register_metadata(self, class_name: bytes, selector: bytes, metadata: dict[str, Any]) -> None:
        """`objc.registerMetaDataForSelector`: it replaces what was known, so arguments must be told again."""
        if class_name != b"NSObject":
            raise self.fail(f"{class_name!r}: Metal's objects are found under NSObject only")
        if self.device is not None:
            raise self.fail(f"{selector!r}: metadata that is registered after a device was made comes too late")
        text = selector.decode()
        methods = [m for owner in self.contract.owners if (m := self.contract.method(owner, text))]
        if not methods:
            raise self.fail(f"no class has a method {text!r}")
        for i, argument in enumerate(methods[0].arguments):
            told = metadata.get("arguments", {}).get(i + 2, {})
            if argument.mode and told.get("type_modifier") != argument.mode.encode():
                raise self.fail(
                    f"{text}: argument {i} is an {argument.mode!r} parameter; the metadata must say so again"
                )
        self.metadata[text] = metadata

    def macos_available(self, major: int, minor: int = 0, patch: int = 0) -> bool:
        asked = plain((major, minor, patch))
        there = self.macos >= asked
        if there:
            self.checked_version = max(self.checked_version, asked)
        return there

    @contextlib.contextmanager
    def autorelease_pool(self) -> Iterator[None]:
        """A pool is made and drained by a message each."""
        self.messages["NSAutoreleasePool"] += 2
        self.pools.append([])
        try:
            yield
        finally:
            for instance in self.pools.pop():
                instance.release()

    def autorelease(self, instance: Instance) -> None:
        if not self.pools:
            raise self.fail(f"{instance.owner} is autoreleased and there is no pool: it leaks")
        self.pools[-1].append(instance)


def _count(method: Method, given: tuple[Any, ...]) -> int:
    """Items of an array argument: told by a range or a count of the same call."""
    for argument, value in zip(method.arguments, given, strict=True):
        if argument.kind == "{_NSRange=QQ}":
            return int(value[1])
    counts = [v for a, v in zip(method.arguments, given, strict=True) if a.kind == "Q"]
    return int(counts[0])


class Instance:
    """An Objective-C object: born with one reference, gone at none."""

    owner = ""
    shared = False  # kept by another object for as long as that lives

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.count = 1
        self._proxy: weakref.ref[Proxy] | None = None
        self.label: str | None = None
        runtime.alive.add(self)

    def retain(self) -> Instance:
        self.check_alive()
        self.count += 1
        return self

    def release(self) -> None:
        self.check_alive()
        self.count -= 1
        if not self.count:
            self.runtime.alive.discard(self)
            self.dealloc()

    def dealloc(self) -> None:
        """The last reference is gone."""

    def check_alive(self) -> None:
        if self.count <= 0:
            raise self.runtime.fail(f"{self.owner} is used after it was released")

    def proxy(self) -> Proxy:
        """The Python object, one for each instance; it holds a reference."""
        existing = self._proxy and self._proxy()
        if existing is None:
            self.retain()
            existing = Proxy(self)
            self._proxy = weakref.ref(existing)
        return existing

    # what every object answers

    def retainCount(self) -> int:
        return self.count

    def setLabel_(self, label: str | None) -> None:
        self.label = label

    def respondsToSelector_(self, selector: str | bytes) -> bool:
        text = selector.decode() if isinstance(selector, bytes) else selector
        found = self.runtime.contract.method(self.owner, text)
        there = found is not None and found.since <= self.runtime.macos
        if there:
            self.runtime.checked.add(text)
        return there


class Proxy:
    """What Python sees of an instance: an attribute is a selector, a call a message."""

    def __init__(self, instance: Instance) -> None:
        object.__setattr__(self, "instance", instance)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        instance: Instance = object.__getattribute__(self, "instance")
        runtime = instance.runtime
        method = runtime.method(instance.owner, name, class_method=False)

        def send(*given: Any) -> Any:
            instance.check_alive()
            runtime.messages[method.selector] += 1
            runtime.time += runtime.faults.message_s
            values = runtime.arguments(method, given)
            body = getattr(instance, name, None)
            if body is None:
                raise runtime.fail(f"{method.name}: the fake does not have it")
            try:
                return answer(runtime, method, body(*values))
            except ContractError as error:
                if error not in runtime.errors:
                    runtime.errors.append(error)
                raise

        return send

    def __setattr__(self, name: str, value: object) -> None:
        raise self.instance.runtime.fail(f"{self.instance.owner}.{name} is set as an attribute; properties are methods")

    def __del__(self) -> None:
        instance: Instance = object.__getattribute__(self, "instance")
        if instance.count > 0:
            instance.release()


def answer(runtime: Runtime, method: Method, result: Any) -> Any:
    """A method's result as PyObjC hands it out: ownership by name and metadata, out-parameters behind it."""
    outs = sum(a.mode == "o" for a in method.arguments)
    value, *rest = result if outs else (result,)
    told = runtime.metadata.get(method.selector, {}).get("retval", {})
    owned = method.selector.startswith("new") and not method.class_method
    if told.get("already_retained") and not owned:
        raise runtime.fail(f"{method.name} does not give its reference away, but its metadata says so: a crash later")
    if isinstance(value, list):  # an NSArray
        return [_hand_out(runtime, item, False, False) for item in value]
    if isinstance(value, Instance):
        value = _hand_out(runtime, value, owned, bool(told.get("already_retained")) or not runtime.over_retains)
    rest = [_hand_out(runtime, r, False, False) if isinstance(r, Instance) else r for r in rest]
    return (value, *rest) if outs else value


def _hand_out(runtime: Runtime, instance: Instance, owned: bool, known: bool) -> Proxy:
    fresh = instance._proxy is None
    proxy = instance.proxy()
    if owned:
        if known:
            instance.release()  # the proxy takes over the reference that came with the object
    elif fresh and instance.count == 2 and not instance.shared:
        runtime.autorelease(instance)
    return proxy


class VarList:
    """What `-[MTLBuffer contents]` gives: memory without a length, which nothing keeps alive."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def as_buffer(self, count: int) -> memoryview:
        buffer = self._buffer
        if count > buffer.software.length:
            raise buffer.runtime.fail(f"as_buffer({count}) of a buffer of {buffer.software.length} bytes")
        memory = (ctypes.c_ubyte * count).from_address(buffer.software.address)
        buffer.views.append(weakref.ref(memory))
        return memoryview(memory).cast("B")
