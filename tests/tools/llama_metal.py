"""Is the software device a Metal device? All Metal sources inside llama-cpp-python must compile on it, unmodified, and
a choice of their kernels must agree with numpy.

    PYTHONPATH=src python tests/tools/llama_metal.py [--sources DIR] [--jobs 2] [--skip-compile] [--only NAME]

Fetches the source package with pip (once, into the cache folder), compiles every kernel in the default configuration
and with bfloat, checks the address spaces of every source (which takes clang), and runs the launches of llama_cases.py
with the lanes in both orders; a kernel that relies on lockstep is run in lockstep and listed with the lines. Ends
with `N passed, N failed` and exits 1 where something failed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_cases import Cases
from llama_launch import Case, Header, error

from minfer.msl import CheckError, Library, MslError, runtime, spaces
from minfer.msl.compiler import build, cache_dir, select
from minfer.msl.emit_cpp import emit_cpp

VERSION, KERNELS, BFLOAT_KERNELS = "0.3.36", 1005, 1066
BATCH = 24
# -O0: every template is instantiated and translated, which is what is asked; -O1 takes many times as long.
FLAGS = ["-O0", "-march=native"]


def fetch(version: str) -> Path:
    """The folder of the package's Metal sources; only they and their two headers are unpacked."""
    target = cache_dir() / f"llama-cpp-python-{version}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        package = f"llama-cpp-python=={version}"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "-d",
            name,
            package,
        ]
        subprocess.run(pip, check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                _, found, path = member.name.partition("/ggml/src/")
                if found and member.isfile() and (path.startswith("ggml-metal/") or path == "ggml-common.h"):
                    member.name = path
                    tar.extract(member, folder / "out", filter="data")
        os.replace(folder / "out", target)
    return target


def sources(root: Path) -> list[Path]:
    """The package's sources, without those that others include."""
    return [f for f in sorted((root / "ggml-metal/kernels").glob("*.metal")) if not f.stem.endswith("_common")]


def library(root: Path, file: Path, *, bfloat: bool = False) -> Library:
    """One of the sources."""
    defines = {"GGML_METAL_HAS_BF16": "1"} if bfloat else {}
    return Library.from_file(
        file, include_dirs=[root, root / "ggml-metal", root / "ggml-metal/kernels"], defines=defines
    )


def compile_batch(source: Library, names: list[str]) -> int:
    """Compile and load some kernels with every function constant 1; returns how many entry points are there."""
    constants = dict.fromkeys(source.unit.constants, 1)
    listed = [(f"msl_k{i}", source.unit.instances[name]) for i, name in enumerate(names)]
    text = emit_cpp(source.unit, [(constants, listed)])
    link = Path(runtime.runtime_path(runtime.runtime_compiler()))
    loaded = ctypes.CDLL(str(build(select(), {"kernel.cpp": text}, FLAGS, link=link)))
    return sum(hasattr(loaded, symbol) for symbol, _ in listed)


def compile_all(root: Path, jobs: int, *, bfloat: bool) -> tuple[int, int, list[str]]:
    """Every kernel of every source: how many there are, how many compiled, and what failed."""
    total, good, faults = 0, 0, []
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for file in sources(root):
            source = library(root, file, bfloat=bfloat)
            names = source.kernel_names
            total += len(names)
            parts = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
            waiting += [(file.name, part, pool.submit(compile_batch, source, part)) for part in parts]
        for name, part, done in waiting:
            try:
                good += done.result()
            except MslError as fault:
                faults.append(f"{name} ({len(part)} kernels): {fault}")
    return total, good, faults


def spaces_of(root: Path) -> tuple[int, int, list[str]]:
    """Every source's address spaces: how many sources there are, how many were read whole and agree, and the rest."""
    files, good, faults = sources(root), 0, []
    for file in files:
        try:
            unread = [f"not read: {place}" for place in spaces.check(library(root, file).unit)]
        except MslError as fault:
            unread = [str(fault)]
        good += not unread
        faults += unread
    return len(files), good, faults


def run(case: Case, libraries: dict[str, Library], order: str) -> float:
    """Run a case's launches from cleared results; returns the difference to numpy."""
    case.got.fill(0)
    for launch in case.launches:
        kernel = libraries[launch.file].kernel(launch.kernel, launch.constants)
        memory = {0: launch.memory} if launch.memory else {}
        kernel(launch.groups, launch.threads, *launch.buffers, threadgroup_memory=memory, order=order)
    return error(case.got, case.want)


def races(case: Case, libraries: dict[str, Library]) -> list[str]:
    """Where the last launch of a case relies on lockstep: the lines of the races that the checked mode finds."""
    launch = case.launches[-1]
    kernel = libraries[launch.file].kernel(launch.kernel, launch.constants)
    try:
        kernel(launch.groups, launch.threads, *launch.buffers, threadgroup_memory={0: launch.memory}, check=True)
    except CheckError as caught:
        found = {(f.file, f.line) for f in caught.report.findings if f.kind == "threadgroup race"}
        return [f"{file}:{line}" for file, line in sorted(found)]
    return []


def prepare(cases: list[Case], root: Path, jobs: int) -> dict[str, Library]:
    """The libraries of the cases, each with the kernels it needs built at once."""
    wanted: dict[str, list[tuple[str, dict[int, object]]]] = {}
    for case in cases:
        for launch in case.launches:
            wanted.setdefault(launch.file, []).append((launch.kernel, launch.constants))
    libraries = {file: library(root, root / f"ggml-metal/kernels/{file}.metal") for file in wanted}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda file: libraries[file].prepare(wanted[file]), wanted))
    return libraries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--sources", type=Path, help="the package's ggml/src folder, instead of fetching it")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    start = time.monotonic()
    root = options.sources or fetch(options.version)
    passed = failed = 0
    if not options.skip_compile:
        for bfloat, expected in ((False, KERNELS), (True, BFLOAT_KERNELS)):
            total, good, faults = compile_all(root, options.jobs, bfloat=bfloat)
            ok = good == total and (total == expected or options.version != VERSION)
            passed, failed = passed + ok, failed + (not ok)
            what = "bfloat" if bfloat else "default"
            print(
                f"{what} configuration: {good} of {total} kernels compiled ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            print("".join(f"  FAILED {fault}\n" for fault in faults), end="")
        total, good, faults = spaces_of(root)
        passed, failed = passed + (good == total), failed + (good != total)
        print(f"address spaces: {good} of {total} sources agree ({time.monotonic() - start:.0f} s)", flush=True)
        print("".join(f"  FAILED {fault}\n" for fault in faults), end="")
    cases = [c for c in Cases(Header(root / "ggml-metal/ggml-metal-impl.h")).all() if options.only in c.name]
    libraries = prepare(cases, root, options.jobs)
    kernels, in_lockstep = set(), []
    for case in cases:
        try:
            worst = max(
                run(case, libraries, order) for order in (["lockstep"] if case.lockstep else ["forward", "backward"])
            )
            ok, how = worst <= case.tolerance, f"{worst:.1e} (at most {case.tolerance:.0e})"
            if case.lockstep:
                lines = races(case, libraries)
                in_lockstep.append(f"{case.name}: {', '.join(lines)}")
                ok = ok and bool(lines)  # without a race it could run like the others
        except MslError as fault:
            ok, how = False, str(fault)
        passed, failed = passed + ok, failed + (not ok)
        kernels |= {launch.kernel for launch in case.launches} if ok else set()
        print(f"{'ok' if ok else 'FAILED':6} {case.name:50} {how}", flush=True)
    cpu = sum(os.times()[:4])
    print(f"\n{len(kernels)} different kernels agree with numpy")
    print(f"{time.monotonic() - start:.0f} s, {cpu:.0f} s of processor time")
    if in_lockstep:
        print(
            "run in lockstep, for the lines where they rely on it:\n" + "".join(f"  {line}\n" for line in in_lockstep)
        )
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
