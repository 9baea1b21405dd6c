"""A pointer whose address space is wrong when it is passed on: found by clang, which knows spaces in C++ for OpenCL.

The names in a source say much (see refuse.py); a pointer without a name, or one that a template made, takes a compiler.
What that language cannot read is no fault of the source: it is left out, and told.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .compiler import NATIVE, TIMEOUT_S
from .emit_spaces import emit_spaces
from .errors import SourceError, ToolError

if TYPE_CHECKING:
    from .unit import Unit

MISSING = "address spaces are checked by clang (14 or later), which is not installed"
OPTIONS = (
    *("-x", "cl", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc", "-fsyntax-only", "-w"),
    *("-ferror-limit=0", "-ftemplate-backtrace-limit=0", "-fno-caret-diagnostics", "-fno-color-diagnostics"),
)
NAMES = {"__global_device": "device", "__global_host": "constant", "__local": "threadgroup", "__private": "thread"}
_MESSAGE = re.compile(r"^(?P<file>.*?):(?P<line>\d+):\d+: (?P<kind>error|note): (?P<text>.*)$")
_POINTEE = re.compile(r"'(?:const |volatile )*(__global_device|__global_host|__local|__private)\b[^']*'")
_FOREIGN = re.compile(r"__generic|__global\b|__constant\b")  # spaces that no source names


@cache
def clang() -> str | None:
    """The path of a clang that takes C++ for OpenCL, or None."""
    for name in ["clang", *(f"clang-{v}" for v in range(25, 13, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, *OPTIONS, "-"], input="", capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return path
    return None


def check(unit: Unit) -> list[str]:
    """Raise SourceError at the first pointer or reference in the wrong address space.

    Gives what the language could not read, as `file:line: words`. Raises ToolError where there is no clang.
    """
    conditionals: frozenset[tuple[str, int]] = frozenset()
    while True:
        messages = _messages(emit_spaces(unit, dict.fromkeys(unit.constants, 1), conditionals))
        found = {(m[0][0], m[0][1]) for m in messages if m[0][2].startswith("incompatible operand types")}
        if not found - conditionals:
            break
        conditionals |= found
    unread = []
    for message in messages:
        file, line = next(((f, n) for f, n, _ in message if f and not f.startswith(str(NATIVE))), (unit.file, 0))
        words = next((text for _, _, text in message if _is_fault(text)), None)
        if words is None:
            unread.append(f"{file}:{line}: {message[0][2]}")
            continue
        words = words.replace("*__private", "*")  # where the pointer itself lies
        for name, ours in NAMES.items():
            words = words.replace(name, ours)
        raise SourceError(f"address spaces differ: {words}", file, line)
    return unread


def _messages(text: str) -> list[list[tuple[str, int, str]]]:
    """clang's errors, each with its notes, as (file, line, words)."""
    path = clang()
    if path is None:
        raise ToolError(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cl").write_text(text)
        done = subprocess.run(
            [path, *OPTIONS, "-I", str(NATIVE), "kernel.cl"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    messages: list[list[tuple[str, int, str]]] = []
    for line in done.stderr.splitlines():
        if m := _MESSAGE.match(line):
            if m["kind"] == "error":
                messages.append([])
            if messages:
                messages[-1].append((m["file"], int(m["line"]), m["text"]))
    if done.returncode and not messages:
        raise ToolError(f"{path} failed: {done.stderr.strip()[:400]}")
    return messages


def _is_fault(text: str) -> bool:
    """Whether clang speaks of two spaces that the source names."""
    if _FOREIGN.search(text):
        return False
    return "address space" in text or len(set(_POINTEE.findall(text))) > 1
