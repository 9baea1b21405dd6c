"""What a report says of the machine: enough to repeat what was found, nothing that tells whose it is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

import minfer

#: Switches that change what runs. Others, such as folders, are of no use to a reader.
SWITCHES = ("MINFER_CPU", "MINFER_KERNELS", "MINFER_METAL_REPLAY", "MSL_CXX", "OMP_NUM_THREADS")


def about() -> dict[str, str]:
    """Versions, operating system and processor."""
    found = {
        "minfer": minfer.__version__,
        "system": _system(),
        "processor": f"{_processor()}, {os.cpu_count()} threads",
        "python": f"{platform.python_implementation()} {platform.python_version()}, numpy {np.__version__}",
    }
    switches = [f"{name}={os.environ[name]}" for name in SWITCHES if os.environ.get(name)]
    return found | ({"switches": " ".join(switches)} if switches else {})


def _system() -> str:
    if version := platform.mac_ver()[0]:
        return f"macOS {version} ({platform.machine()})"
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()} ({platform.machine()})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def anonymous(text: str) -> str:
    """Without the name of the user, which paths in the words of compilers and systems may have."""
    return text.replace(str(Path.home()), "~")
