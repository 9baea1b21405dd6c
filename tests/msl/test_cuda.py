"""The CUDA text: right on the software device (the same source), and accepted by NVRTC for two GPUs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cuda_cases import CASES, FOLDER, Case, error

from minfer.msl import CompileError, Library, ToolError, nvrtc
from minfer.msl.__main__ import main
from minfer.msl.emit_cuda import emit_cuda, entry

if TYPE_CHECKING:
    from pathlib import Path

ARCHS = ("sm_80", "sm_90")
needs_nvrtc = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases_are_right_on_the_software_device(case: Case) -> None:
    buffers, want = case.buffers(np.random.default_rng(1))
    kernel = Library.from_file(case.path).kernel(case.kernel, case.constants)
    kernel(case.groups, case.threads, *buffers, threadgroup_memory=case.memory)
    for slot, expected in want.items():
        got = buffers[slot]
        assert got is not None
        assert error(got, expected, case.each) <= case.tolerance, slot


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("file", sorted({c.file for c in CASES}))
def test_every_construct_compiles(file: str, arch: str) -> None:
    wanted = [(c.kernel, c.constants) for c in CASES if c.file == file]
    module = nvrtc.module(Library.from_file(FOLDER / file).unit, wanted, arch)
    assert module.cubin[:4] == b"\x7fELF"
    for symbol, _ in module.entries.values():
        assert f".text.{symbol}\0".encode() in module.cubin
    assert len(module.entries) == len({(k, tuple(sorted(c.items()))) for k, c in wanted})


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def text_of(source: str, constants: dict[str, int] | None = None) -> str:
    unit = Library(HEAD + source, name="k.metal").unit
    return emit_cuda(unit, [(constants or {}, [("k", i) for i in unit.instances.values()])])


def test_a_kernel_says_itself_where_it_waits_and_where_the_next_may_be_placed() -> None:
    body = "kernel void k(device int * x [[buffer(0)]]) {{ {} x[0] = 1; }}"
    calls = ("wait_for_those_before();", "next_may_be_placed();")
    helpers = "inline void wait_for_those_before() {} inline void next_may_be_placed() {} "
    for own in ((), calls[:1], calls[1:], calls):
        entry = text_of(helpers + body.format(" ".join(own))).partition("__global__")[2]
        assert ("msl_cuda::wait();" in entry, "msl_cuda::chain();" in entry) == tuple(c not in own for c in calls)


def test_threadgroup_memory_is_shared_and_aligned() -> None:
    text = text_of("kernel void k(uint i [[thread_position_in_grid]]) { threadgroup float a[4][8], b; a[0][i] = b; }")
    assert "alignas(16) alignas(float) __shared__ float a [ 4 ] [ 8 ];" in text
    assert "alignas(16) alignas(float) __shared__ float b ;" in text
    assert "threadgroup float" not in text


def test_no_space_or_attribute_is_left() -> None:
    text = text_of(
        "kernel void k(device float * x [[buffer(3)]], constant int & n [[buffer(1)]], "
        "uint i [[thread_position_in_grid]]) { x[i] = n; }"
    )
    body = text.partition("entry points")[0]
    assert not any(word in body for word in ("device ", "constant ", "[[", "kernel "))
    assert 'extern "C" __global__ void k(const __grid_constant__ int b1, void *b3)' in text


def test_arguments_are_in_order_of_their_slots() -> None:
    source = """kernel void k(device float * x [[buffer(16)]], threadgroup float * t [[threadgroup(2)]],
                constant int & n [[buffer(3)]], threadgroup float * s [[threadgroup(0)]],
                uint i [[thread_position_in_grid]]) { t[i] = x[i]; s[i] = n; }"""
    unit = Library(HEAD + source).unit
    slots = entry(unit.kernels["k"])
    assert (slots.buffers, slots.threadgroup, slots.values) == ((3, 16), (0, 2), {3})


def test_launch_bounds_come_from_the_kernel() -> None:
    assert "__launch_bounds__(96) k(" in text_of(
        "[[max_total_threads_per_threadgroup(96)]] kernel void k(device float * x [[buffer(0)]]) { x[0] = 1; }"
    )


def test_constants_are_baked_in() -> None:
    source = "constant int N [[function_constant(0)]];\nkernel void k(device int * x [[buffer(0)]]) { x[0] = N; }"
    assert "{ return (int)(5ll); }" in text_of(source, {"N": 5})


@needs_nvrtc
def test_an_error_names_the_metal_line() -> None:
    source = HEAD + "kernel void k(device float * x [[buffer(0)]]) {\n  x[0] = undefined_name;\n}"
    unit = Library(source, name="wrong.metal").unit
    with pytest.raises(CompileError, match=r'wrong\.metal\(4\): error: identifier "undefined_name" is undefined'):
        nvrtc.module(unit, [("k", {})], "sm_80")


@needs_nvrtc
def test_unknown_architectures_are_refused() -> None:
    unit = Library(HEAD + "kernel void k(device float * x [[buffer(0)]]) { x[0] = 1; }").unit
    with pytest.raises(ToolError, match="is no GPU architecture"):
        nvrtc.module(unit, [("k", {})], "sm_90 --include-path=/")
    with pytest.raises(ToolError, match="does not know sm_12"):
        nvrtc.module(unit, [("k", {})], "sm_12")


@needs_nvrtc
def test_a_cubin_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Library(HEAD + "kernel void kept(device float * x [[buffer(0)]]) { x[0] = 3; }").unit
    first = nvrtc.module(unit, [("kept", {})], "sm_80")

    def refuse(name: str, *args: object) -> int:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_call", refuse)
    assert nvrtc.module(unit, [("kept", {})], "sm_80").cubin == first.cubin


@needs_nvrtc
def test_a_cubin_that_is_cut_off_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "cache_dir", lambda: tmp_path / "kept")
    unit = Library(HEAD + "kernel void cut(device float * x [[buffer(0)]]) { x[0] = 4; }").unit
    first = nvrtc.module(unit, [("cut", {})], "sm_80").cubin
    (kept,) = (tmp_path / "kept").glob("*.cubin")
    for damage in (b"", kept.read_bytes()[:-1], first):
        kept.write_bytes(damage)
        assert nvrtc.module(unit, [("cut", {})], "sm_80").cubin == first
        assert kept.read_bytes()[nvrtc.DIGEST :] == first


@needs_nvrtc
def test_what_cannot_be_kept_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(nvrtc, "cache_dir", lambda: tmp_path / "file" / "below")
    unit = Library(HEAD + "kernel void lost(device float * x [[buffer(0)]]) { x[0] = 5; }").unit
    assert nvrtc.module(unit, [("lost", {})], "sm_80").cubin[:4] == b"\x7fELF"


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSL_NVRTC", "/nowhere/libnvrtc.so")
    nvrtc.library.cache_clear()
    try:
        with pytest.raises(ToolError, match="pip install nvidia-cuda-nvrtc-cu12"):
            nvrtc.library()
    finally:
        nvrtc.library.cache_clear()


@needs_nvrtc
def test_check_compiles_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.metal"
    body = "constant half H [[function_constant(0)]];\nkernel void k(device float * x [[buffer(0)]], "
    body += "device half * h [[buffer(1)]])"
    file.write_text(HEAD + body + " { x[0] = x[1] > 0 ? float(h[0]) : 1.0f + H; }")
    assert main(["check", str(file), "--cuda", "sm_80"]) == 0
    assert "sm_80: a cubin of" in capsys.readouterr().out
    file.write_text(HEAD + body + " { int i = h[0]; x[0] = i; }")  # what only the software device takes
    assert main(["check", str(file), "--cuda", "sm_80"]) == 2
    assert "k.metal(4): error: no suitable conversion function" in capsys.readouterr().err


@needs_nvrtc
def test_a_conditional_of_half_and_float_is_a_float() -> None:
    source = """kernel void k(device float * x [[buffer(0)]], device half * h [[buffer(1)]],
        device bfloat * b [[buffer(2)]]) {
        const float y = x[0];
        x[0] = y > 0 ? h[0] : y;
        x[1] = y > 1 ? 1.0f : y > 2 ? h[1] : (y > 3 ? y * 2 : b[0]);
        x[2] = y > 4 ? 0.5h : x[3];
        device half * p = y > 5 ? h : 0;
        p[0] = y > 6 ? h[2] : h[3];
    }"""
    unit = Library(HEAD + source, name="k.metal").unit
    assert nvrtc.module(unit, [("k", {})], "sm_80").cubin[:4] == b"\x7fELF"
