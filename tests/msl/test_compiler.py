"""Compilers and the cache: a missing one is a sentence, nothing is compiled twice, errors name the Metal source."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from minfer.msl import CompileError, Library, ToolError
from minfer.msl import compiler as module

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void fill(device float * x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    x[i] = 3;
}
"""


def test_no_compiler_is_a_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSL_CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    module.compilers.cache_clear()
    module.select.cache_clear()
    try:
        with pytest.raises(ToolError, match=r"install g\+\+ .*clang.*pip install ziglang"):
            module.select()
    finally:
        module.compilers.cache_clear()
        module.select.cache_clear()


def test_a_compiler_without_half_is_not_used(tmp_path: Path) -> None:
    old = tmp_path / "c++"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "clang version 14.0.6" && exit\nexit 1\n')
    old.chmod(0o755)
    with pytest.raises(ToolError, match=r"c\+\+' is no C\+\+ compiler that works here; .*_Float16.* clang 15 or later"):
        module.select(str(old))


def test_a_compiled_kernel_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Library(SOURCE).kernel("fill").entry()  # the runtime is there
    monkeypatch.setenv("MSL_CACHE", str(tmp_path))
    calls: list[str] = []
    run = module._run

    def counted(compiler: Any, args: list[str], folder: Path) -> None:
        calls.append(args[-1])
        run(compiler, args, folder)

    monkeypatch.setattr(module, "_run", counted)
    Library(SOURCE.replace("3", "4")).kernel("fill").entry()
    first = len(calls)
    assert first > 0
    x = np.zeros(8, np.float32)
    Library(SOURCE.replace("3", "4")).kernel("fill")(1, 8, x)
    assert (len(calls), list(x)) == (first, [4] * 8)
    Library(SOURCE.replace("3", "5")).kernel("fill")(1, 8, x)
    assert len(calls) > first
    assert list(x) == [5] * 8


def test_several_kernels_are_one_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Library(SOURCE).kernel("fill").entry()
    monkeypatch.setenv("MSL_CACHE", str(tmp_path))
    calls: list[str] = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda c, args, folder: (calls.append(args[-1]), run(c, args, folder)))
    source = (
        SOURCE
        + "constant int n [[function_constant(0)]];\nkernel void add(device float * x [[buffer(0)]]) { x[0] += n; }\n"
    )
    library = Library(source)
    library.prepare([("fill", {}), ("add", {"n": 1}), ("add", {"n": 2})])
    assert len(calls) == 2  # compile and link
    x = np.zeros(1, np.float32)
    for n in (1, 2, 2):
        library.kernel("add", {"n": n})(1, 1, x)
    assert (x[0], len(calls)) == (5, 2)


def test_the_compilers_words_name_the_metal_source(compiler: str) -> None:
    library = Library(SOURCE.replace("x[i] = 3", "x[i] = undeclared"), name="oops.metal", compiler=compiler)
    with pytest.raises(CompileError, match=r"oops\.metal:4:.*undeclared"):
        library.kernel("fill").entry()


def test_a_store_to_constant_memory_is_refused(compiler: str) -> None:
    library = Library(SOURCE.replace("device float", "constant float"), name="oops.metal", compiler=compiler)
    with pytest.raises(CompileError, match=r"oops\.metal:4:"):
        library.kernel("fill").entry()


def test_a_name_cannot_escape_into_a_command() -> None:
    name = '"; touch pwned #\\.metal'
    x = np.zeros(8, np.float32)
    Library(SOURCE, name=name).kernel("fill")(1, 8, x)
    assert list(x) == [3] * 8
