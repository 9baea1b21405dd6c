"""A pretended Mac for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakemetal import Runtime, installed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Verdicts on replay go to a folder of the test; no switch of the caller reaches it."""
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    for name in ("MINFER_METAL_REPLAY", "MINFER_METAL_CAPTURE", "MINFER_KERNELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mac() -> Iterator[Runtime]:
    """An M3 with macOS 15. What breaks Apple's contract, or is never released, fails the test at its end."""
    with installed(Runtime()) as runtime:
        yield runtime
