"""Runs the cases of cuda_cases.py on an NVIDIA GPU and compares them with the software device and with numpy.

    PYTHONPATH=src python tests/msl/gpu_check.py [--seeds 3] [--json result.json]

A case passes where the GPU agrees with the software device within its class (`near`: 0 is every bit) and with numpy
within its tolerance, and no byte behind a buffer has changed. Exits 1 where one fails. Needs a driver, NVRTC and g++.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cuda_cases import CASES, Case, error, mul_mm

from minfer.msl import Library, nvrtc

GUARD = 256
POINTER = ctypes.c_uint64


class Driver:
    """The CUDA driver by ctypes, one device."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.arch = name.value.decode(), f"sm_{major.value}{minor.value}"
        self.cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def function(self, cubin: bytes, symbol: str) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
        return function

    def upload(self, data: bytes) -> POINTER:
        at = POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(len(data)))
        self.call("cuMemcpyHtoD_v2", at, data, ctypes.c_size_t(len(data)))
        return at

    def download(self, at: POINTER, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, at, ctypes.c_size_t(size))
        return data.raw

    def launch(
        self, function: ctypes.c_void_p, groups: list[int], threads: list[int], shared: int, args: list[Any]
    ) -> None:
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        self.call("cuLaunchKernel", function, *groups, *threads, shared, None, pointers, None)

    def milliseconds(self, work: Any, rounds: int = 20) -> float:
        """The median time of one call of `work`, by events."""
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for e in events:
            self.call("cuEventCreate", ctypes.byref(e), 0)
        times = []
        for _ in range(rounds):
            self.call("cuEventRecord", events[0], None)
            work()
            self.call("cuEventRecord", events[1], None)
            self.call("cuEventSynchronize", events[1])
            took = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(took), *events)
            times.append(took.value)
        return float(np.median(times))


class Compiled:
    """A case's kernel for the device, ready to be launched."""

    def __init__(self, gpu: Driver, case: Case) -> None:
        unit = Library.from_file(case.path).unit
        module = nvrtc.module(unit, [(case.kernel, case.constants)], gpu.arch)
        ((symbol, self.slots),) = module.entries.values()
        self.gpu, self.function = gpu, gpu.function(module.cubin, symbol)

    def arguments(self, arrays: list[Any], memory: dict[int, int]) -> tuple[list[Any], int]:
        """Upload `arrays` (with a guard behind each) and lay out the dynamic memory: the arguments and its size."""
        args: list[Any] = []
        for slot, a in zip(self.slots.buffers, arrays, strict=True):
            if a is not None and slot in self.slots.values:
                args.append((ctypes.c_char * a.nbytes).from_buffer_copy(a.tobytes()))
            else:
                args.append(POINTER(0) if a is None else self.gpu.upload(a.tobytes() + b"\xa5" * GUARD))
        total = 0
        for slot in self.slots.threadgroup:
            args.append(ctypes.c_uint32(total))
            total += memory[slot]
        return args, total

    def run(self, case: Case, arrays: list[Any]) -> list[Any]:
        """Run once and read every buffer back. Raises where a guard has changed."""
        args, shared = self.arguments(arrays, dict(case.memory))
        sizes = [[*s, 1, 1][:3] for s in (case.groups, case.threads)]
        self.gpu.launch(self.function, *sizes, shared, args)
        self.gpu.call("cuCtxSynchronize")
        out = []
        for array, at in zip(arrays, args, strict=False):
            if array is None or not isinstance(at, POINTER):
                out.append(array)
                continue
            data = self.gpu.download(at, array.nbytes + GUARD)
            if data[array.nbytes :] != b"\xa5" * GUARD:
                raise RuntimeError("the kernel wrote behind a buffer")
            out.append(np.frombuffer(data[: array.nbytes], array.dtype).reshape(array.shape))
            self.gpu.call("cuMemFree_v2", at)
        return out


def check(compiled: Compiled, case: Case, seed: int) -> dict[str, Any]:
    """One case, one seed: differences to the software device and to numpy, and how many results have equal bits."""
    ours, want = case.buffers(np.random.default_rng(seed))
    got = compiled.run(case, ours)
    kernel = Library.from_file(case.path).kernel(case.kernel, case.constants)
    kernel(case.groups, case.threads, *ours, threadgroup_memory=case.memory)
    result: dict[str, Any] = {"device": 0.0, "numpy": 0.0, "equal": 0, "of": 0}
    for slot, expected in want.items():
        mine = ours[slot]
        assert mine is not None
        result["device"] = max(result["device"], error(got[slot], mine, case.each))
        result["numpy"] = max(result["numpy"], error(got[slot], expected, case.each))
        same = got[slot].view(np.uint8).reshape(-1, got[slot].itemsize) == mine.view(np.uint8).reshape(
            -1, mine.itemsize
        )
        result["equal"] += int(same.all(axis=1).sum())
        result["of"] += got[slot].size
    result["passed"] = result["device"] <= case.near and result["numpy"] <= case.tolerance
    return result


def timings(gpu: Driver) -> dict[str, float]:
    """Milliseconds of the untuned matrix kernels, at sizes beyond a case's."""
    by_name = {c.name: c for c in CASES}
    rng = np.random.default_rng(0)
    out = {}
    rows, k = 49152, 576
    mv = Compiled(gpu, by_name["mul_mv_q4_1, 2 rows"])
    weights = rng.integers(0, 2, rows * k // 32 * 20).astype(np.uint8)
    args, _ = mv.arguments(
        [weights, rng.standard_normal(k, np.float32), np.zeros(rows, np.float32), np.int32([k]), np.int32([rows])], {}
    )
    out[f"mul_mv_q4_1 {rows} x {k}"] = gpu.milliseconds(
        lambda: gpu.launch(mv.function, [rows // 4, 1, 1], [64, 1, 1], 0, args)
    )
    n = 1024
    mm = Compiled(gpu, by_name["mul_mm_f16"])
    arrays, _ = mul_mm(n, n, n)(rng)
    args2, _ = mm.arguments(arrays, {})
    out[f"mul_mm_f16 {n} x {n} x {n}"] = gpu.milliseconds(
        lambda: gpu.launch(mm.function, [n // 32, n // 32, 1], [128, 1, 1], 0, args2)
    )
    return {name: round(ms, 4) for name, ms in out.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    gpu = Driver()
    failed, rows = 0, {}
    for case in CASES:
        try:
            compiled = Compiled(gpu, case)
            results = [check(compiled, case, seed) for seed in range(1, options.seeds + 1)]
        except Exception as fault:
            failed += 1
            rows[case.name] = {"fault": str(fault)}
            print(f"{case.name:32} FAILED: {fault}", flush=True)
            continue
        worst = {key: max(r[key] for r in results) for key in ("device", "numpy")}
        equal, of = (sum(r[key] for r in results) for key in ("equal", "of"))
        passed = all(r["passed"] for r in results)
        failed += not passed
        rows[case.name] = {**worst, "class": case.near, "equal": equal, "of": of, "passed": passed}
        verdict, differs = "ok" if passed else "FAILED", f"device {worst['device']:.1e} numpy {worst['numpy']:.1e}"
        print(f"{case.name:32} {verdict:6} {differs} bits {equal}/{of}", flush=True)
    report = {
        "gpu": gpu.name,
        "arch": gpu.arch,
        "driver_cuda": gpu.cuda,
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "host": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": options.commit,
        "seeds": options.seeds,
        "cases": rows,
        "milliseconds": timings(gpu),
    }
    print(json.dumps(report["milliseconds"]), f"\n{len(CASES) - failed} passed, {failed} failed")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
