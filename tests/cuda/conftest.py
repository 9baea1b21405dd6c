"""What the tests of CUDA share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import fakecuda
import pytest
from fakecuda import FakeCuda, Result

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A machine with a GPU. Whatever is not given back fails the test at its end, unless the device died."""
    made = FakeCuda()
    fakecuda.install(monkeypatch, made)
    yield made
    gc.collect()
    if made.broken is Result.CUDA_SUCCESS and not made.hangs:
        assert (made.memory, made.pinned, made.live, made.graphs) == ({}, {}, set(), 0)
