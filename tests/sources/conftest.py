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


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory):
    """A file of one root certificate: nothing here speaks TLS, and reading all of them takes most of a test's time."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    path = tmp_path_factory.mktemp("tls") / "one.pem"
    with open(certifi.where(), encoding="utf-8") as every:
        path.write_text(every.read().partition(end)[0] + end, "utf-8")
    return path


@pytest.fixture
def server(cache_folder, one_certificate, monkeypatch):
    from minfer.sources import http, ollama

    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))
    server = ModelServer()
    monkeypatch.setattr(ollama, "REGISTRY", server.url)
    monkeypatch.setattr(http, "_BACKOFF", 0.0)
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield server
    server.close()
