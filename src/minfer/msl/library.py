"""`Library`: Metal source to callable kernels, on any CPU.

lib = Library(source)
add = lib.kernel("add", constants={"bias": 2})
add(groups, threads, x, y)          # numpy arrays, in order of their [[buffer(n)]]
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from . import runtime
from .checks import Binding, Checked, CheckError, Report
from .compiler import build, select
from .emit import constant_text
from .emit_cpp import emit_cpp
from .errors import LaunchError, MslError, ToolError
from .frontend import parse
from .preprocess import Preprocessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .compiler import Compiler
    from .emit import Value
    from .unit import Instance, Param

INSTRUMENTED = ["-O1", "-g1", "-DMSL_INSTRUMENTED", "-fsanitize=thread"]
FLAGS = {
    "fast": ["-O2"],
    "checked": [*INSTRUMENTED, "-fsanitize=alignment,bounds,integer-divide-by-zero", "-fsanitize-recover=all"],
    # Addresses must follow the order of the source (see native/checks.cpp), which only unoptimized code promises.
    "lockstep": [*(f for f in INSTRUMENTED if f != "-O1"), "-O0", "-DMSL_LOCKSTEP"],
}
# Clang leaves out the read of `a += b`, and gives code that two statements share no line.
CLANG_FLAGS = [
    word
    for flag in (
        "-tsan-instrument-read-before-write=1",
        "-enable-tail-merge=false",
        "-simplifycfg-sink-common=false",
        "-simplifycfg-hoist-common=false",
    )
    for word in ("-mllvm", flag)
]
Key = tuple[str, tuple[tuple[str, "Value"], ...]]


class RunArguments(TypedDict, total=False):
    """Options of a launch: `threadgroup_memory` maps [[threadgroup(n)]] to bytes; `order` is forward, backward,
    shuffled (by `seed`) or lockstep; `os_threads` processors; `count` asks a checked launch for byte counters;
    `timeout` is how many seconds no threadgroup may begin or end."""

    threadgroup_memory: Mapping[int, int]
    order: str
    seed: int
    os_threads: int | None
    count: bool
    timeout: float


@dataclass(frozen=True)
class Argument:
    """A kernel's argument: `kind` is buffer or threadgroup, `writable` tells whether the kernel may store through it,
    `optional` whether a function constant may leave it out."""

    name: str
    kind: str
    index: int
    writable: bool
    optional: bool


class Library:
    """A Metal source, parsed and checked; kernels are compiled when they are asked for.

    `include_dirs` are the only places an #include may read (besides Metal's own headers, which are built in);
    `defines` are macros; `compiler` is g++, clang, zig or a command. Raises SourceError with file and line.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "source.metal",
        include_dirs: Sequence[Path | str] = (),
        defines: Mapping[str, str] | None = None,
        compiler: str | None = None,
        directory: Path | None = None,
    ) -> None:
        pre = Preprocessor([Path(d) for d in include_dirs], defines)
        self.unit = parse(pre.run(source, name, directory.resolve() if directory else None), name)
        self.files = frozenset([name, *(p.name for p in pre.files)])
        self.name = name
        self._compiler_name = compiler
        self._built: dict[tuple[str, Key], int] = {}
        self._loaded: list[ctypes.CDLL] = []

    @classmethod
    def from_file(cls, path: Path | str, **options: Any) -> Library:
        """Read a .metal file; quoted includes are looked up beside it too."""
        path = Path(path)
        return cls(path.read_text(encoding="utf-8"), name=path.name, directory=path.parent, **options)

    @property
    def kernel_names(self) -> list[str]:
        """The host names of all kernels."""
        return list(self.unit.instances)

    @property
    def compiler(self) -> Compiler:
        """The compiler this library uses; raises ToolError where there is none."""
        return select(self._compiler_name)

    def kernel(self, name: str, constants: Mapping[str | int, Value] | None = None) -> Kernel:
        """A kernel by its host name, with function constants by name or by index.

        Raises MslError for an unknown kernel or constant, and for a constant that the kernel needs and is not given.
        """
        return Kernel(self, self.key(name, constants or {}))

    def key(self, name: str, constants: Mapping[str | int, Value]) -> Key:
        """What a compiled kernel is kept under: its name and the constants it may read, sorted. Raises as `kernel`."""
        if name not in self.unit.instances:
            known = ", ".join(list(self.unit.instances)[:8])
            raise MslError(f"no kernel {name!r} in {self.name}; it has {len(self.unit.instances)}: {known} ...")
        instance = self.unit.instances[name]
        by_index = {c.index: c for c in self.unit.constants.values()}
        given: dict[str, Value] = {}
        for which, value in constants.items():
            constant = by_index.get(which) if isinstance(which, int) else self.unit.constants.get(which)
            if constant is None:
                raise MslError(f"{self.name} has no function constant {which!r}")
            if constant.name in instance.constants:
                try:
                    constant_text(constant, value)
                except (TypeError, ValueError, OverflowError) as error:
                    raise MslError(str(error)) from error
                given[constant.name] = value
        tokens = self.unit.tokens
        asked = {tokens[i + 2].text for i, t in enumerate(tokens) if t.text == "is_function_constant_defined"}
        for missing in instance.constants:
            if missing not in given and missing not in asked:
                c = self.unit.constants[missing]
                raise MslError(f"kernel {name!r} needs function constant {c.name!r} (index {c.index}, {c.type})")
        return name, tuple(sorted(given.items()))

    def prepare(self, wanted: Iterable[tuple[str, Mapping[Any, Value]]], mode: str = "fast") -> None:
        """Build several (kernel, constants) in one compilation: much cheaper than one by one."""
        self._build([self.key(name, constants) for name, constants in wanted], mode)

    def translate(self, name: str, constants: Mapping[str | int, Value] | None = None, mode: str = "fast") -> str:
        """The C++ text of one kernel's translation unit. Constants that are not given have no value here."""
        given = {k: v for k, v in (constants or {}).items() if isinstance(k, str)}
        return emit_cpp(self.unit, [(given, [("msl_k", self.unit.instances[name])])], mode)

    def _build(self, keys: Iterable[Key], mode: str) -> None:
        variants: dict[tuple[tuple[str, Value], ...], dict[str, Instance]] = {}
        for name, constants in keys:
            if (mode, (name, constants)) not in self._built:
                variants.setdefault(constants, {})[name] = self.unit.instances[name]
        if not variants:
            return
        symbols: dict[str, Key] = {}
        plan = []
        for constants, instances in variants.items():
            listed = []
            for name, instance in instances.items():
                symbol = "msl_k_" + hashlib.sha256(json.dumps([name, constants]).encode()).hexdigest()[:16]
                symbols[symbol] = (name, constants)
                listed.append((symbol, instance))
            plan.append((dict(constants), listed))
        text = emit_cpp(self.unit, plan, mode)
        link = Path(runtime.runtime_path(runtime.runtime_compiler()))
        flags = [*FLAGS[mode], *(CLANG_FLAGS if mode == "checked" and self.compiler.kind != "gcc" else [])]
        path = build(self.compiler, {"kernel.cpp": text}, [*flags, "-march=native"], link=link)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise ToolError(f"the compiled kernel cannot be loaded: {error}") from error
        self._loaded.append(loaded)
        for symbol, key in symbols.items():
            self._built[mode, key] = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value or 0

    def entry(self, key: Key, mode: str) -> int:
        """The address of a kernel's entry point, built where needed."""
        if (mode, key) not in self._built:
            self._build([key], mode)
        return self._built[mode, key]


def _argument(p: Param) -> Argument:
    return Argument(p.name, p.kind, p.index, not p.const, bool(p.condition))


class Kernel:
    """One kernel with its function constants; call it with a grid and numpy arrays."""

    def __init__(self, library: Library, key: Key) -> None:
        self.library, self._key = library, key
        self.name = key[0]
        self.constants: dict[str, Value] = dict(key[1])
        source = library.unit.instances[key[0]].kernel
        self.arguments = sorted(
            (_argument(p) for p in source.params if p.kind != "builtin"), key=lambda a: (a.kind, a.index)
        )
        self.max_threads = source.max_threads or runtime.MAX_THREADS

    def entry(self, mode: str = "fast") -> int:
        """The native entry point (compiled on first use)."""
        return self.library.entry(self._key, mode)

    def __call__(
        self,
        groups: int | Sequence[int],
        threads: int | Sequence[int],
        *buffers: object,
        check: bool = False,
        **options: Unpack[RunArguments],
    ) -> Report | None:
        """Run `groups` threadgroups of `threads` threads, with the buffers in order of their index.

        A buffer is a C-contiguous numpy array (stores land in it), bytes or a numpy scalar (read only), a `Binding`
        that declares more about it, or None where a function constant leaves it out. With `check`, every access is
        checked: returns the Report, or raises CheckError where there are findings. Raises LaunchError.
        """
        nominal, count = size3(threads), size3(groups)
        return self._launch([a * b for a, b in zip(nominal, count, strict=True)], nominal, buffers, check, options)

    def dispatch_threads(
        self,
        grid: int | Sequence[int],
        threads: int | Sequence[int],
        *buffers: object,
        check: bool = False,
        **options: Unpack[RunArguments],
    ) -> Report | None:
        """The same with a grid counted in threads; threadgroups at its edge are smaller where it does not divide."""
        return self._launch(size3(grid), size3(threads), buffers, check, options)

    def _launch(
        self, grid: list[int], threads: list[int], buffers: Sequence[object], check: bool, options: RunArguments
    ) -> Report | None:
        order = options.get("order", "forward")
        mode = "lockstep" if order == "lockstep" else "checked" if check else "fast"
        records = (runtime.LaunchRecord * 1)()
        keep = self.fill(
            records[0], grid, threads, buffers, options.get("threadgroup_memory", {}), mode, bind_all=not check
        )
        checked = None
        if check:
            slots = [a.index for a in self.arguments if a.kind == "buffer"]
            bindings = {i: b for i, b in zip(slots, buffers, strict=True) if isinstance(b, Binding)}
            checked = Checked(self, records[0], bindings, mode, count=options.get("count", False))
        runtime.run(
            records,
            1,
            threads=options.get("os_threads"),
            order=order,
            seed=options.get("seed", 0),
            names=[self.name],
            timeout=options.get("timeout", runtime.TIMEOUT_S),
        )
        del keep
        if checked is None:
            return None
        report = checked.report()
        if report.findings:
            raise CheckError(report)
        return report

    def fill(
        self,
        record: runtime.LaunchRecord,
        grid: list[int],
        threads: list[int],
        buffers: Sequence[object],
        tg: Mapping[int, int],
        mode: str = "fast",
        *,
        bind_all: bool = True,
    ) -> list[object]:
        """Write a launch; returns what must stay alive until it has run. `bind_all` refuses unbound buffers."""
        check_sizes(self.name, grid, threads, self.max_threads)
        slots = [a for a in self.arguments if a.kind == "buffer"]
        if len(buffers) != len(slots):
            names = ", ".join(f"{a.name} [[buffer({a.index})]]" for a in slots)
            raise LaunchError(f"kernel {self.name} takes {len(slots)} buffers ({names}); {len(buffers)} given")
        keep: list[object] = []
        for slot, value in zip(slots, buffers, strict=True):
            if value is None:
                if bind_all and not slot.optional:
                    raise LaunchError(f"kernel {self.name}: {slot.name} [[buffer({slot.index})]] is not bound")
                continue
            what = f"kernel {self.name}: {slot.name} [[buffer({slot.index})]]"
            binding = value if isinstance(value, Binding) else Binding(value)
            array = as_array(binding.data, slot.writable and binding.writes != (), what)
            keep.append(array)
            length = array.nbytes - binding.offset if binding.length is None else binding.length
            if not 0 <= binding.offset <= array.nbytes or not 0 <= length <= array.nbytes - binding.offset:
                raise LaunchError(
                    f"{what}: offset {binding.offset} and length {length} leave the {array.nbytes} bytes bound"
                )
            record.buffer[slot.index], record.length[slot.index] = array.ctypes.data + binding.offset, length
        fill_threadgroup(self, record, tg)
        record.entry = self.entry(mode)
        for i in range(3):
            record.grid[i], record.threads[i] = grid[i], threads[i]
            record.groups[i] = -(-grid[i] // threads[i])
        return keep


def size3(value: int | Sequence[int]) -> list[int]:
    """A Metal size: one to three positive integers, filled up with ones. Raises LaunchError."""
    given = [value] if isinstance(value, (int, np.integer)) else list(value)
    if not 1 <= len(given) <= 3 or any(int(v) != v or not 0 <= v < 2**32 for v in given):
        raise LaunchError(f"a size is one to three non-negative integers, not {value!r}")
    return [int(v) for v in given] + [1] * (3 - len(given))


def check_sizes(name: str, grid: Sequence[int], threads: Sequence[int], max_threads: int) -> None:
    """Refuse what a Metal device refuses. Raises LaunchError."""
    if math.prod(threads) < 1 or math.prod(threads) > max_threads:
        raise LaunchError(
            f"kernel {name}: {math.prod(threads)} threads a threadgroup {tuple(threads)}; "
            f"1 to {max_threads} are allowed"
        )
    if math.prod(-(-g // t) for g, t in zip(grid, threads, strict=True)) >= 2**32 or any(g >= 2**32 for g in grid):
        raise LaunchError(f"kernel {name}: the grid {tuple(grid)} is too large")


def fill_threadgroup(
    kernel: Kernel, record: runtime.LaunchRecord, tg: Mapping[int, int], most: int = runtime.MAX_THREADGROUP_BYTES
) -> None:
    """Set the lengths of [[threadgroup(n)]] memory. Raises LaunchError where one is missing, unknown or too long."""
    slots = {a.index: a for a in kernel.arguments if a.kind == "threadgroup"}
    for index, length in tg.items():
        if index not in slots:
            raise LaunchError(f"kernel {kernel.name} has no [[threadgroup({index})]]")
        if length <= 0 or length % 16:
            raise LaunchError(
                f"kernel {kernel.name}: threadgroup memory {index} of {length} bytes; "
                "a positive multiple of 16 is needed"
            )
        record.tg_length[index] = length
    for index, a in slots.items():
        if index not in tg and not a.optional:
            raise LaunchError(f"kernel {kernel.name}: {a.name} [[threadgroup({index})]] has no length")
    total = sum(tg.values())
    if total > most:
        raise LaunchError(f"kernel {kernel.name}: {total} bytes of threadgroup memory; a threadgroup has {most}")


def as_array(value: object, writable: bool, what: str) -> np.ndarray[Any, Any]:
    """A buffer argument as a contiguous array that shares its memory. Raises LaunchError."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        array = np.frombuffer(value, dtype=np.uint8)
    elif isinstance(value, np.generic):
        array = np.frombuffer(value.tobytes(), dtype=np.uint8)
        if writable:
            raise LaunchError(f"{what} is written by the kernel; pass an array, not a scalar")
        return array
    elif isinstance(value, np.ndarray):
        array = value
    else:
        raise LaunchError(f"{what}: {type(value).__name__} is no buffer; pass a numpy array, bytes or a numpy scalar")
    if not array.flags.c_contiguous:
        raise LaunchError(f"{what}: the array is not contiguous; a copy would hide the kernel's stores")
    if writable and not array.flags.writeable:
        raise LaunchError(f"{what}: the array is read-only and the kernel may write it")
    return array
