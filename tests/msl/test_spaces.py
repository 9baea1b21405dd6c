"""Address spaces by a compiler: pointers that no name tells of, refused for their reason; legal sources are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.backends.gpu.kernels import FAMILIES, source
from minfer.msl import Library, SourceError, spaces
from minfer.msl.__main__ import main
from minfer.msl.errors import ToolError

pytestmark = pytest.mark.skipif(spaces.clang() is None, reason="needs clang")

METAL = sorted(Path(__file__).parent.rglob("*.metal"))
HEAD = """#include <metal_stdlib>
using namespace metal;
constant float table[4] = {1, 2, 3, 4};
struct holder { device float * p; int n; };
float from_device(device const float * p) { return p[0]; }
float from_group(threadgroup const float * p) { return p[0]; }
float from_constant(constant float * p) { return p[0]; }
float from_thread(thread float & r) { return r; }
device float * next_(device float * p) { return p + 1; }
template <typename T> T first(threadgroup const T * p) { return *p; }
template <float (*F)(threadgroup const float *)> float each(threadgroup const float * p) { return F(p); }
float overloaded(threadgroup const float * p) { return p[0]; }
float overloaded(constant int * p) { return p[0]; }
"""
KERNEL = """kernel void k(device float * x [[buffer(0)]], constant holder & a [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {{
    threadgroup float shared[8];
    float mine = 2;
    shared[i] = x[i];
    threadgroup float * inside = shared;
{}
}}
"""
LINE = HEAD.count("\n") + 7

#: One line each, that the names in the source do not give away.
ILLEGAL = {
    "an address": ("x[0] = from_group(&x[i]);", "cannot pass pointer to address space 'device'"),
    "either of two": ("x[0] = from_group(i > 1 ? x : x + 2);", "pointer to address space 'threadgroup'"),
    "a member": ("x[0] = from_group(a.p);", "'device'"),
    "what a function gives": ("x[0] = from_group(next_(x));", "'device'"),
    "auto": ("auto p = x; x[0] = from_group(p);", "'device'"),
    "a template's parameter": ("x[0] = first(&x[i]);", "does not match adjusted type 'device float *'"),
    "every overload": ("x[0] = overloaded(&x[i]);", "'device'"),
    "a table as device memory": (
        "x[0] = from_device(table);",
        "'const constant float[4]' to 'const device",
    ),
    "device memory as a table": ("x[0] = from_constant(&x[2]);", "'device' as a pointer to address space 'constant'"),
    "a local as device memory": ("x[0] = from_device(&mine);", "'thread' as a pointer to address space 'device'"),
    "an assignment": ("inside = &x[1];", "changes address space of pointer"),
    "a cast": ("inside = (threadgroup float *)(&x[1]);", "converts between mismatching address spaces"),
    "a reinterpret_cast": ("inside = reinterpret_cast<threadgroup float *>(&x[1]);", "address space"),
    "a reference": ("x[0] = from_thread(shared[1]);", "cannot bind reference in address space"),
    "a matrix in thread memory": ("simdgroup_float8x8 m; simdgroup_load(m, &mine, 8);", "thread"),
    "an atomic in thread memory": (
        "atomic_uint c; atomic_fetch_add_explicit(&c, 1, memory_order_relaxed);",
        "thread",
    ),
    "an aggregate": ("threadgroup float * both[2] = {inside, &x[1]};", "cannot initialize an array element"),
}
LEGAL = {
    "each to its own": "x[0] = from_device(a.p) + from_group(&shared[1]) + from_constant(table) + from_thread(mine);",
    "a member of constant memory": "x[0] = from_constant((constant float *)&a.n);",
    "templates": "x[0] = first(&shared[2]) + each<from_group>(inside) + each<first<float>>(inside);",
    "overloads": "x[0] = overloaded(&a.n) + overloaded(inside);",
    "casts within a space": "*(device float4 *)x = *(device const float4 *)(x + 4) * float4(1, 2, 3, 4).wzyx;",
    "copies between spaces": "holder h = a; h.n += 1; shared[i] = table[h.n]; x[i] = shared[i];",
    "values of two kinds": "float4 v[2]; x[0] = (i > 1 ? v[0] : float4(0.0f)).x;",
    "results by reference": "float whole; x[0] = modf(x[1], whole) + whole;",
}


def library(line: str) -> Library:
    return Library(HEAD + KERNEL.format(line), name="bad.metal")


@pytest.mark.parametrize("name", ILLEGAL)
def test_the_wrong_space_is_refused(name: str) -> None:
    line, reason = ILLEGAL[name]
    unit = library(line).unit  # its names are in order
    with pytest.raises(SourceError) as caught:
        spaces.check(unit)
    assert caught.value.reason.startswith("address spaces differ: ")
    assert reason in caught.value.reason
    assert (caught.value.file, caught.value.line) == ("bad.metal", LINE)


def test_a_function_that_returns_the_wrong_space_is_refused() -> None:
    text = HEAD + "threadgroup float * wrong(device float * p) {\n    return p + 1;\n}\n" + KERNEL.format("")
    with pytest.raises(SourceError, match="address spaces differ") as caught:
        spaces.check(Library(text, name="bad.metal").unit)
    assert caught.value.line == LINE - 5


def test_a_template_is_refused_where_it_is_instantiated() -> None:
    text = """#include <metal_stdlib>
using namespace metal;
template <typename P> kernel void copy(P from [[buffer(0)]], device float * y [[buffer(1)]]) {
    device const float * p = from;
    y[0] = p[0];
}
"""
    text = text.replace("P from", "constant P & from")
    good = text.replace("p = from", "p = from.p") + "struct s { device float * p; };\n"
    named = 'template [[host_name("c")]] kernel void copy<s>(constant s &, device float *);\n'
    assert spaces.check(Library(good + named, name="good.metal").unit) == []
    bad = good.replace("device float * p;", "threadgroup float * p;")
    with pytest.raises(SourceError, match="threadgroup") as caught:
        spaces.check(Library(bad + named, name="bad.metal").unit)
    assert caught.value.line == 4


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_right_is_taken_and_read_whole(name: str) -> None:
    assert spaces.check(library(LEGAL[name]).unit) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_our_kernels_agree(family: str) -> None:
    assert spaces.check(Library(source(family), name=f"{family}.metal").unit) == []


@pytest.mark.parametrize("path", METAL, ids=lambda path: path.name)
def test_the_kernels_of_these_tests_agree(path: Path) -> None:
    assert spaces.check(Library.from_file(path).unit) == []


def test_the_command_refuses_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.metal"
    path.write_text(HEAD + KERNEL.format(ILLEGAL["an address"][0]))
    assert main(["check", str(path)]) == 2
    assert f"bad.metal:{LINE}: address spaces differ: " in capsys.readouterr().err


def test_without_clang_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "good.metal"
    path.write_text(HEAD + KERNEL.format(""))
    monkeypatch.setattr(spaces, "clang", lambda: None)
    with pytest.raises(ToolError, match="checked by clang"):
        spaces.check(Library.from_file(path).unit)
    assert main(["check", str(path)]) == 0
    assert "note: address spaces are checked by clang (14 or later), which is not installed" in capsys.readouterr().out


def test_what_the_language_cannot_read_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that C++ for OpenCL keeps for itself."""
    path = tmp_path / "good.metal"
    path.write_text(HEAD + KERNEL.format("int pipe = 3; x[0] = pipe;"))
    assert len(spaces.check(Library.from_file(path).unit)) > 0
    assert main(["check", str(path)]) == 0
    assert f"note: address spaces are not checked at good.metal:{LINE}: " in capsys.readouterr().out
