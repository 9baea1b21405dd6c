"""`python -m minfer.msl check file.metal` and `... run file.metal kernel ...`: Metal kernels on any CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import spaces
from .checks import Binding, CheckError
from .errors import MslError, ToolError
from .library import Kernel, Library

if TYPE_CHECKING:
    from .emit import Value

TYPES: dict[str, Any] = {f"{k}{n}": np.dtype(f"{k}{n // 8}").type for k in "iu" for n in (8, 16, 32, 64)}
TYPES |= {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
RUN_HELP = """\
A buffer is one of, in the order of the kernel's buffers:
  f32:128            128 zeros           (f32 f16 bf16 i8 u8 i16 u16 i32 u32 i64 u64; 4x32 is a shape)
  f32:128:random     normal numbers      f32:128:arange  0, 1, 2, ...     f32:128:fresh  zeros that nothing has written
  u32=576  f32=1,2   these values        data.npy        a numpy file     -              not bound
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns 0 when all is well, 1 when a check found faults, 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m minfer.msl", description="Metal kernels on any CPU")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="parse, refuse what Metal refuses, and compile every kernel")
    run = commands.add_parser(
        "run", help="run one kernel", epilog=RUN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for sub in (check, run):
        sub.add_argument("file", type=Path)
        sub.add_argument("-I", dest="include", action="append", default=[], type=Path, help="a directory for #include")
        sub.add_argument("-D", dest="define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro")
        sub.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE", help="a function constant")
        sub.add_argument("--compiler", help="g++, clang, zig or a command; default: the first that is found")
    check.add_argument("--cuda", metavar="ARCH", help="also compile the CUDA text, for sm_80, sm_90, ... (needs NVRTC)")
    run.add_argument("kernel")
    run.add_argument("--groups", default="1", help="threadgroups, like 8 or 4,2")
    run.add_argument("--threads", default="32", help="threads a threadgroup")
    run.add_argument("-b", dest="buffers", action="append", default=[], metavar="BUFFER")
    run.add_argument("--threadgroup", action="append", default=[], metavar="INDEX=BYTES")
    run.add_argument("--order", default="forward", choices=["forward", "backward", "shuffled", "lockstep"])
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--check", action="store_true", help="check every access, and count them")
    run.add_argument("--save", type=Path, help="a .npz file for the buffers after the run")
    args = parser.parse_args(argv)
    try:
        library = Library.from_file(
            args.file,
            include_dirs=args.include,
            defines=dict(_pair(d, "1") for d in args.define),
            compiler=args.compiler,
        )
        constants: dict[str | int, Value] = {k: _value(v) for k, v in (_pair(c) for c in args.constant)}
        return _check(library, constants, args.cuda) if args.command == "check" else _run(library, args, constants)
    except (MslError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _pair(text: str, default: str | None = None) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and default is None:
        raise MslError(f"{text!r} is not NAME=VALUE")
    return name, value if equals else default or ""


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text, 0)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise MslError(f"{text!r} is no value of a function constant") from None


def _check(library: Library, constants: dict[str | int, Value], arch: str | None) -> int:
    unit = library.unit
    dummies: dict[str | int, Value] = {c.name: 1 for c in unit.constants.values()}  # any value compiles
    try:
        notes = [f"address spaces are not checked at {place}" for place in spaces.check(unit)]
    except ToolError as missing:
        notes = [str(missing)]
    library.prepare([(name, {**dummies, **constants}) for name in library.kernel_names])
    if arch:
        from . import nvrtc

        keys = [library.key(name, {**dummies, **constants}) for name in library.kernel_names]
        size = len(nvrtc.module(unit, [(name, dict(values)) for name, values in keys], arch).cubin)
        print(f"{arch}: a cubin of {size} bytes")
    for name in library.kernel_names:
        kernel = Kernel(library, library.key(name, {**dummies, **constants}))
        arguments = ", ".join(
            f"{a.name} [[{a.kind}({a.index})]]" + ("" if a.kind != "buffer" else " written" if a.writable else " read")
            for a in kernel.arguments
        )
        needs = ", ".join(unit.instances[name].constants)
        print(f"{name}({arguments}){f' constants: {needs}' if needs else ''}")
    print("".join(f"note: {note}\n" for note in notes), end="")
    print(f"{library.name}: {len(library.kernel_names)} kernel(s), no faults found in the source")
    return 0


def _buffer(spec: str, rng: np.random.Generator) -> Binding | None:
    """A buffer from its description in RUN_HELP."""
    if spec == "-":
        return None
    if spec.endswith(".npy"):
        return Binding(np.ascontiguousarray(np.load(spec, allow_pickle=False)), label=spec)
    kind, equals, listed = spec.partition("=")
    kind, _, rest = (kind, "", "") if equals else spec.partition(":")
    if kind not in TYPES:
        raise MslError(f"buffer {spec!r}: {kind!r} is none of {', '.join(TYPES)}")
    try:
        if equals:
            return Binding(np.array([_value(v) for v in listed.split(",")]).astype(TYPES[kind]), label=spec)
        size, _, fill = rest.partition(":")
        shape = tuple(int(n) for n in size.split("x"))
        array: np.ndarray[Any, Any] = np.zeros(shape, TYPES[kind])
    except ValueError as error:
        raise MslError(f"buffer {spec!r}: {error}") from error
    if fill == "random":
        array[...] = rng.standard_normal(shape) if array.dtype.kind == "f" else rng.integers(0, 256, shape)
    elif fill == "arange":
        array[...] = np.arange(array.size).reshape(shape)
    elif fill not in ("", "fresh"):
        raise MslError(f"buffer {spec!r}: {fill!r} is none of random, arange, fresh")
    empty = np.zeros((array.nbytes + 7) // 8, np.uint8) if fill == "fresh" else None
    return Binding(array, label=spec, initialised=empty)


def _run(library: Library, args: argparse.Namespace, constants: dict[str | int, Value]) -> int:
    kernel = library.kernel(args.kernel, constants)
    rng = np.random.default_rng(args.seed)
    buffers = [_buffer(spec, rng) for spec in args.buffers]
    memory = {int(i): int(n) for i, n in (_pair(t) for t in args.threadgroup)}
    groups, threads = ([int(n) for n in text.split(",")] for text in (args.groups, args.threads))
    code = 0
    try:
        report = kernel(
            groups, threads, *buffers, check=args.check, count=args.check, order=args.order, seed=args.seed,
            threadgroup_memory=memory,
        )  # fmt: skip
    except CheckError as error:
        report, code = error.report, 1
    slots = [a for a in kernel.arguments if a.kind == "buffer"]
    if report is not None:
        print(report)
        c = report.counters
        print(f"{c.barriers} barriers, {c.collectives} simdgroup functions, {c.matrix_operations} matrix operations")
        for a in slots:
            if a.index in c.read:
                print(
                    f"{a.name}: read {c.read[a.index]} bytes ({c.read_distinct[a.index]} distinct), "
                    f"written {c.written[a.index]} ({c.written_distinct[a.index]} distinct)"
                )
    for a, b in zip(slots, buffers, strict=True):
        if b is not None and a.writable:
            print(f"{a.name} = {np.array2string(b.data, threshold=16, edgeitems=4)}")
    if args.save:
        np.savez(args.save, **{a.name: b.data for a, b in zip(slots, buffers, strict=True) if b is not None})
    return code


if __name__ == "__main__":
    sys.exit(main())
