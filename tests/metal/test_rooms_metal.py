"""Objective-C is touched in one folder."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "minfer"


def test_only_the_metal_folder_imports_objective_c() -> None:
    imports = re.compile(r"^\s*(import|from) (objc|Metal|Foundation|AppKit|Cocoa)\b", re.MULTILINE)
    found = {path.parent.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if imports.search(path.read_text())}
    assert found == {"backends/gpu/devices/metal"}
