"""C++ compilers: which are there, how they are called, and a disk cache of what they made.

No shell is involved and no name from a source reaches a command line: sources are written to files that we name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import CompileError, ToolError

NATIVE = Path(__file__).parent / "native"
COMMON = [
    "-std=c++17",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-Werror=vla",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
]
MISSING = (
    "no C++ compiler with _Float16 found: install g++ 12 or later (Debian, Ubuntu: apt install g++), clang 15 or "
    "later, or the ziglang package from PyPI (pip install ziglang), or name one in MSL_CXX"
)
TIMEOUT_S = 900


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: `kind` is gcc, clang or zig; `command` what starts it; `version` its first line of --version."""

    kind: str
    command: tuple[str, ...]
    version: str


def _probe(kind: str, command: tuple[str, ...]) -> Compiler | None:
    """The compiler behind a command, or None: there is none, or one too old for `half` (g++ 11, clang 14)."""

    def run(*args: str, input: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *args], input=input, capture_output=True, text=True, timeout=60, check=False)

    try:
        out = run("--version")
        if out.returncode or not out.stdout or run("-fsyntax-only", "-xc++", "-", input="_Float16 half;").returncode:
            return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not kind:
        kind = "clang" if "clang" in out.stdout else "gcc"
    return Compiler(kind, command, out.stdout.splitlines()[0])


@cache
def compilers() -> dict[str, Compiler]:
    """Every compiler found, by the names g++, clang and zig."""
    found: dict[str, Compiler] = {}
    gxx = shutil.which("g++")
    if gxx and (c := _probe("", (gxx,))):
        found["g++" if c.kind == "gcc" else "clang"] = c
    for name in ["clang++", *(f"clang++-{v}" for v in range(25, 14, -1))]:
        path = shutil.which(name)
        if path and (c := _probe("clang", (path,))):
            found.setdefault("clang", c)
            break
    if importlib.util.find_spec("ziglang") is not None and (
        c := _probe("zig", (sys.executable, "-m", "ziglang", "c++"))
    ):
        found["zig"] = c
    return found


@cache
def select(name: str | None = None) -> Compiler:
    """The compiler of that name (g++, clang, zig, or a command line), or the best one: MSL_CXX, g++, clang, zig.

    Raises ToolError with what to install when there is none.
    """
    name = name or os.environ.get("MSL_CXX")
    if name:
        if name in compilers():
            return compilers()[name]
        command = tuple(shlex.split(name))
        found = (
            _probe("zig" if "ziglang" in command or "zig" in Path(command[0]).name else "", command)
            if command
            else None
        )
        if found is None:
            raise ToolError(f"{name!r} is no C++ compiler that works here; {MISSING}")
        return found
    for known in ("g++", "clang", "zig"):
        if known in compilers():
            return compilers()[known]
    raise ToolError(MISSING)


def cache_dir() -> Path:
    """Where compiled kernels are kept: MSL_CACHE, or a folder in the user's cache directory."""
    base = os.environ.get("MSL_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minfer" / "msl"


@cache
def _machine() -> str:
    """What -march=native depends on, so that a cache on a shared disk is not used on another processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    )


@cache
def _native_text() -> str:
    return "".join(p.name + p.read_text() for p in sorted(NATIVE.iterdir()) if p.suffix in (".h", ".cpp"))


def build(
    compiler: Compiler,
    sources: dict[str, str | Path],
    flags: list[str],
    *,
    soname: bool = False,
    link: Path | None = None,
) -> Path:
    """Compile and link a shared library, or find it in the cache.

    `sources` maps file names (ours) to their text or to a path in `native`. Raises CompileError with the compiler's
    words, ToolError when it cannot be run.
    """
    texts = {k: v if isinstance(v, str) else v.read_text() for k, v in sources.items()}
    flags = [*COMMON, *flags] + (["-fno-sanitize=undefined"] if compiler.kind == "zig" and "-g" not in flags else [])
    key = hashlib.sha256(
        "\0".join(
            [
                _machine(),
                compiler.version,
                *compiler.command,
                *flags,
                _native_text(),
                link.name if link else "",
                *texts,
                *texts.values(),
            ]
        ).encode()
    ).hexdigest()[:32]
    folder = cache_dir()
    target = folder / f"{'libmslrt-' if soname else 'k-'}{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        work = Path(name)
        objects = []
        for file, text in texts.items():
            (work / file).write_text(text)
            obj = f"{file}.o"
            _run(compiler, [*flags, "-I", str(NATIVE), "-c", file, "-o", obj], work)
            objects.append(obj)
        # Zig would link undefined-behaviour handlers of its own, which abort, in place of ours.
        zig = ["-O2", "-fno-sanitize=undefined"] if compiler.kind == "zig" else []
        last = [*zig, "-shared", "-pthread", *objects, "-o", "out.so", "-Wl,--as-needed"]
        if soname:
            last.append(f"-Wl,-soname,{target.name}")
        if link:
            last.append(str(link))
        _run(compiler, [*last, "-lm"], work)
        os.replace(work / "out.so", target)
    return target


def _run(compiler: Compiler, args: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            [*compiler.command, *args], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{compiler.version} did not finish within {TIMEOUT_S} s") from error
    except OSError as error:
        raise ToolError(f"{compiler.command[0]} cannot be started: {error}") from error
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if " error: " in line or "error:" in line[:40]
        ] or done.stderr.splitlines()[-3:]
        more = f"\n... and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise CompileError(f"{compiler.version} refuses the translated source:\n" + "\n".join(lines[:8]) + more)
