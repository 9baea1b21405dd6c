"""The rooms of src/minfer: what each may import, and how large a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "minfer"

#: A room may import itself, `errors`, and these.
MAY_IMPORT = {
    "errors": set(),
    "quants": set(),
    "gguf": {"quants"},
    "text": {"gguf"},
    "graph": {"quants"},
    "models": {"graph", "gguf"},
    "kv": {"quants"},
    "backends": {"graph", "quants"},
    "cases": {"graph", "quants"},
    "sources": {"gguf"},
    "engine": {"backends", "gguf", "graph", "kv", "models", "quants", "sources", "text"},
    "doctor": {"backends", "cases", "graph", "quants"},
    "msl": set(),
}
#: The one place outside `msl` that may know of it.
DEVICES_OF_THE_GPU = SRC / "backends" / "gpu" / "devices"
LIMITS = {".py": 500, ".metal": 700, ".cpp": 900, ".h": 900}


def _room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("minfer.") and "." in name}
    return rooms


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    files = [path for path in SRC.rglob("*.py") if _room(path) == room]
    allowed = MAY_IMPORT[room] | {room} | (set() if room == "msl" else {"errors"})
    for path in files:
        own = {"msl"} if path.parent == DEVICES_OF_THE_GPU else set()
        assert _imports(path) <= allowed | own, path


def test_every_room_is_listed() -> None:
    rooms = {_room(path) for path in SRC.rglob("*.py")}
    assert rooms - set(MAY_IMPORT) <= {"__init__", "__main__", "cli"}


def test_files_stay_small() -> None:
    over = {
        str(path.relative_to(SRC)): lines
        for path in SRC.rglob("*")
        if (limit := 150 if path.parent.name == "models" and path.suffix == ".py" else LIMITS.get(path.suffix))
        and (lines := len(path.read_text().splitlines())) > limit
    }
    assert over == {}, "split by concept, or raise the budget in the design"
