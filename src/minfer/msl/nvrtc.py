"""NVRTC by ctypes: CUDA C++ to a cubin, which needs neither a GPU nor the CUDA toolkit, and a disk cache.

The library comes from a wheel of PyPI (nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13) or from the system's
CUDA. Our headers are handed over as text; no include directory is given, so a source cannot read other files.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .compiler import NATIVE, cache_dir
from .emit_cuda import Entry, emit_cuda, entry
from .errors import CompileError, ToolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .emit import Value
    from .unit import Instance, Unit

HEADERS = ("msl_cuda.h", "msl_types.h", "msl_math.h")
# Functions without a qualifier are device functions. No contraction, small numbers are kept, / and sqrt round right.
OPTIONS = ("--std=c++17", "-default-device", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "-w")
DIGEST = 32  # bytes of SHA-256 before a cubin that is kept
MISSING = (
    "NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc, for CUDA 13), install the CUDA "
    "toolkit, or name the library in MSL_NVRTC"
)


def _candidates() -> Iterator[str]:
    named = os.environ.get("MSL_NVRTC")
    if named:
        yield named
        return
    windows = sys.platform == "win32"
    pattern = "nvrtc64_*_0.dll" if windows else "libnvrtc.so.*"
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        for folder in ("cuda_nvrtc/lib", "cuda_nvrtc/bin", "cu13/lib", "cu13/bin/x86_64"):
            yield from (str(p) for p in sorted(Path(base, folder).glob(pattern)) if ".alt" not in p.name)
    yield from ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"] if windows else ["libnvrtc.so.13", "libnvrtc.so.12"]
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


@cache
def library() -> ctypes.CDLL:
    """The NVRTC library. Raises ToolError with what to install."""
    for path in _candidates():
        try:
            lib = ctypes.CDLL(path)
        except OSError:
            continue
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        return lib
    raise ToolError(MISSING)


def _call(name: str, *args: object) -> int:
    return int(getattr(library(), name)(*args))


@cache
def version() -> tuple[int, int]:
    """NVRTC's version, for example (12, 9)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    if _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor)):
        raise ToolError("NVRTC does not tell its version")
    return major.value, minor.value


@cache
def _headers() -> tuple[tuple[str, bytes], ...]:
    return tuple((name, (NATIVE / name).read_text(encoding="utf-8").encode()) for name in HEADERS)


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def compile_cubin(text: str, arch: str = "sm_80") -> bytes:
    """Translated CUDA C++ to a cubin for `arch` (sm_80, sm_90, ...), kept on disk by hash, after its own hash: what is
    not whole is made anew, and what cannot be kept is not.

    Raises CompileError with NVRTC's words and the lines of the .metal file; ToolError where NVRTC is missing.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ToolError(f"{arch!r} is no GPU architecture; they are called sm_80, sm_90, ...")
    options = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in OPTIONS)]
    headers = _headers()
    key = hashlib.sha256(
        b"\0".join([repr(version()).encode(), *options, *(h[1] for h in headers), text.encode()])
    ).hexdigest()[:32]
    target = cache_dir() / f"c-{key}.cubin"
    try:
        kept = target.read_bytes()
    except OSError:
        kept = b""
    if kept and hashlib.sha256(kept[DIGEST:]).digest() == kept[:DIGEST]:
        return kept[DIGEST:]
    program = ctypes.c_void_p()
    count = len(headers)
    contents = (ctypes.c_char_p * count)(*(h[1] for h in headers))
    names = (ctypes.c_char_p * count)(*(h[0].encode() for h in headers))
    failed = _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", count, contents, names)
    if failed:
        raise ToolError(f"NVRTC: {library().nvrtcGetErrorString(failed).decode()}")
    try:
        failed = _call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise _refusal(failed, _text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace"), arch)
        cubin = _text(program, "CUBIN")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, target)
    return cubin


def _refusal(code: int, log: str, arch: str) -> CompileError | ToolError:
    if "--gpu-architecture" in log:
        return ToolError(f"NVRTC {'.'.join(map(str, version()))} does not know {arch}: {log.strip()}")
    errors = [line for line in log.splitlines() if "error:" in line or "error #" in line]
    if not errors:
        return ToolError(f"NVRTC: {library().nvrtcGetErrorString(code).decode()}: {log.strip()[:400]}")
    more = f"\n... and {len(errors) - 8} more" if len(errors) > 8 else ""
    return CompileError("NVRTC refuses the translated source:\n" + "\n".join(errors[:8]) + more)


@dataclass(frozen=True)
class Module:
    """A cubin and its kernels: (host name, constants as sorted pairs) to (symbol, order of the arguments)."""

    arch: str
    cubin: bytes
    entries: dict[tuple[str, tuple[tuple[str, Value], ...]], tuple[str, Entry]]


def module(unit: Unit, wanted: Sequence[tuple[str, Mapping[str, Value]]], arch: str) -> Module:
    """Compile several (kernel, constants by name) of a source in one go."""
    plan: dict[tuple[tuple[str, Value], ...], list[tuple[str, Instance]]] = {}
    entries: dict[tuple[str, tuple[tuple[str, Value], ...]], tuple[str, Entry]] = {}
    for name, constants in wanted:
        key = tuple(sorted(constants.items()))
        if (name, key) not in entries:
            # A profiler shows the symbol.
            instance, symbol = unit.instances[name], re.sub(r"\W", "_", f"{name}_{len(entries)}")
            entries[name, key] = symbol, entry(instance.kernel)
            plan.setdefault(key, []).append((symbol, instance))
    variants = [(dict(key), instances) for key, instances in plan.items()]
    places: frozenset[tuple[str, int]] = frozenset()
    while True:
        try:
            return Module(arch, compile_cubin(emit_cuda(unit, variants, places), arch), entries)
        except CompileError as fault:  # `c ? half : float` is no error in Metal: those places are written otherwise
            found = re.findall(r'^(.+)\((\d+)\): error: ambiguous "\?"', str(fault), re.MULTILINE)
            more = frozenset((file, int(line)) for file, line in found) - places
            if not more:
                raise
            places |= more
