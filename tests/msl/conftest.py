"""Fixtures of the MSL tests: one cache folder for the session, and the compilers that this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minfer.msl.compiler import compilers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests must not pass thanks to what an earlier version compiled."""
    import os

    before = os.environ.get("MSL_CACHE")
    if before is None:
        os.environ["MSL_CACHE"] = str(tmp_path_factory.mktemp("msl-cache"))
    yield
    if before is None:
        del os.environ["MSL_CACHE"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compiler" in metafunc.fixturenames:
        metafunc.parametrize("compiler", sorted(compilers()), scope="session")
