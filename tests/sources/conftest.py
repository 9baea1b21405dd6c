"""A model server, and a cache folder of one's own."""

from __future__ import annotations

import os

import pytest
from model_server import ModelServer


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINFER_CACHE", str(folder))
    return folder


@pytest.fixture
def server(cache_folder, monkeypatch):
    from minfer.sources import http, ollama

    server = ModelServer()
    monkeypatch.setattr(ollama, "REGISTRY", server.url)
    monkeypatch.setattr(http, "_BACKOFF", 0.0)
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield server
    server.close()
