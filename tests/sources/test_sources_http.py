"""Transfers that break, lie or change, and what the two hubs may answer."""

from __future__ import annotations

import hashlib
import json
import socket

import pytest
from model_server import Blob, model_bytes

from minfer import sources
from minfer.errors import SourceError
from minfer.sources import cache, hf, http, ollama

DATA = model_bytes(200_000)
BLOB = f"/v2/library/tiny/blobs/sha256:{hashlib.sha256(DATA).hexdigest()}"


def nothing_kept(problem: str | None = None) -> bool:
    return [entry.problem for entry in sources.installed()] == ([problem] if problem else [])


def test_fetch_reports_progress(server):
    server.ollama(DATA)
    seen = []
    path = sources.resolve("ollama:tiny", progress=lambda *state: seen.append(state))
    assert (path.name, path.read_bytes()) == ("tiny-latest.gguf", DATA)
    fetching = [state for state in seen if state[2] == "fetching tiny-latest.gguf"]
    assert fetching[0] == (0, len(DATA), "fetching tiny-latest.gguf")
    assert fetching[-1][0] == len(DATA)
    assert [state[0] for state in fetching] == sorted(state[0] for state in fetching)
    requests = len(server.requests)
    assert sources.resolve("ollama:tiny:latest") == path
    assert len(server.requests) == requests  # a cached model needs no network


def test_cut_connections_are_resumed(server):
    server.ollama(DATA, cut=[1000, 50_000, 0, None])
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB) == [None, "bytes=1000-", "bytes=51000-", "bytes=51000-"]
    assert server.sent < len(DATA) + 2000  # no byte of the model twice


def test_short_body_without_a_length_is_noticed(server):
    server.ollama(DATA, cut=[1000, None], chunked=True)
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB) == [None, "bytes=1000-"]


def test_server_that_ignores_range_is_read_from_the_start(server):
    server.ollama(DATA, cut=[150_000, 1000, None], ranges=False)
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB) == [None, "bytes=150000-", "bytes=1000-"]


@pytest.mark.parametrize("lie", ["bytes 0-199999/200000", "bytes 1000-199999/300000", "nonsense"])
def test_wrong_content_range_is_not_appended(server, lie):
    server.ollama(DATA, cut=[1000, None], content_range=lie)
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB) == [None, "bytes=1000-", None]


def test_416_starts_again(server):
    server.ollama(DATA, cut=[1000, None], status=[200, 416, 200])
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB) == [None, "bytes=1000-", None]


def test_tries_are_bounded_and_what_came_is_kept(server):
    server.ollama(DATA, cut=[10])
    with pytest.raises(
        SourceError, match=r"broke off 5 times in a row .*; 50 bytes of 200\.0 kB are kept, run the same"
    ):
        sources.resolve("ollama:tiny")
    assert len(server.gets(BLOB)) == http.TRIES
    assert nothing_kept("unfinished")
    server.blobs[BLOB].cut = [None]
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB)[-1] == "bytes=50-"


def test_endless_empty_answers_end(server):
    server.ollama(DATA, cut=[0], chunked=True)
    with pytest.raises(SourceError, match=r"TryAgain: the body ended after 0 of 200000 bytes"):
        sources.resolve("ollama:tiny")
    assert len(server.gets(BLOB)) == http.TRIES


def test_wrong_hash_is_dropped(server):
    server.ollama(DATA)
    server.blobs[BLOB].data = wrong = DATA[:-1] + b"?"
    digest = hashlib.sha256(wrong).hexdigest()
    with pytest.raises(
        SourceError, match=f"arrived with SHA-256 {digest}, expected {BLOB[-64:]}; the file was dropped"
    ):
        sources.resolve("ollama:tiny")
    assert len(server.gets(BLOB)) == 1
    assert not list(cache.root().rglob("*.part"))
    assert not list(cache.root().rglob("*.gguf"))


def test_content_that_changed_between_tries_is_fetched_anew(server):
    blob = server.ollama(DATA, cut=[1000])
    blob.data = model_bytes(len(DATA), seed=2)
    with pytest.raises(SourceError, match="broke off"):
        sources.resolve("ollama:tiny")
    before = len(server.gets(BLOB))
    blob.data, blob.cut = DATA, [None]
    assert sources.resolve("ollama:tiny").read_bytes() == DATA
    assert server.gets(BLOB)[before:] == ["bytes=5000-", None]


def test_new_version_does_not_continue_the_old_one(server):
    server.ollama(DATA, cut=[1000])
    with pytest.raises(SourceError, match="broke off"):
        sources.resolve("ollama:tiny")
    newer = model_bytes(len(DATA), seed=2)
    server.ollama(newer)
    before = len(server.requests)
    assert sources.resolve("ollama:tiny").read_bytes() == newer
    assert [r for _, r in server.requests[before:]] == [None, None]  # the manifest, the blob


@pytest.mark.parametrize("chunked", [False, True])
def test_longer_body_is_refused(server, chunked):
    blob = server.ollama(DATA, chunked=chunked)
    blob.data = DATA + b"more"
    with pytest.raises(SourceError, match=r"offers 200004 bytes as .*expected 200000|sends more than the 200000 bytes"):
        sources.resolve("ollama:tiny")
    assert len(server.gets(BLOB)) == 1


@pytest.mark.parametrize(
    ("status", "tries", "text"),
    [
        (404, 1, r"tiny-latest\.gguf does not exist: 127\.0\.0\.1:\d+ answered 404; check the name"),
        (403, 1, "needs a login or is not public"),
        (302, 1, "answered 302, expected 200"),
        (503, http.TRIES, r"broke off 5 times in a row \(TryAgain: HTTP 503\)"),
        (429, http.TRIES, "HTTP 429"),
    ],
)
def test_http_errors(server, status, tries, text):
    server.ollama(DATA, status=[status])
    with pytest.raises(SourceError, match=text):
        sources.resolve("ollama:tiny")
    assert len(server.gets(BLOB)) == tries


def test_passing_trouble_of_the_server(server):
    server.ollama(DATA, status=[503, 500, 200], headers={"Retry-After": "0"})
    assert sources.resolve("ollama:tiny").read_bytes() == DATA


def test_redirect_to_a_store(server):
    server.ollama(DATA)
    server.blobs["/store"] = server.blobs[BLOB]
    server.blobs[BLOB] = Blob(b"", status=[307], headers={"Location": server.url + "/store"})
    assert sources.resolve("ollama:tiny").read_bytes() == DATA


def test_redirect_loop_ends(server):
    server.ollama(DATA)
    server.blobs[BLOB] = Blob(b"", status=[307], headers={"Location": BLOB})
    with pytest.raises(SourceError, match="TooManyRedirects"):
        sources.resolve("ollama:tiny")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_offline(server, monkeypatch):
    where = f"127.0.0.1:{closed_port()}"
    monkeypatch.setattr(ollama, "REGISTRY", f"http://{where}")
    with pytest.raises(SourceError, match=rf"cannot reach {where} \(ConnectError: .*check the network.*minfer list"):
        sources.resolve("ollama:tiny")
    assert nothing_kept()


MODEL = "application/vnd.ollama.image.model"
DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b" " * (1 << 21), "exceeds 1048576 bytes"),
        ({}, "has 0 GGUF layers, expected 1; its manifest lists: none"),
        ({"layers": 7}, "has 0 GGUF layers"),
        (
            {"layers": [3, {"mediaType": "application/vnd.ollama.image.tensor"}]},
            "lists: application/vnd.ollama.image.tensor",
        ),
        ({"layers": [{"mediaType": MODEL, "digest": DIGEST, "size": 5}] * 2}, "has 2 GGUF layers"),
        ({"layers": [{"mediaType": MODEL, "digest": "sha256:../../../x", "size": 5}]}, r"digest 'sha256:\.\./"),
        (
            {"layers": [{"mediaType": MODEL}, {"mediaType": MODEL.replace("model", "adapter")}]},
            "a LoRA adapter beside it",
        ),
        ({"layers": [{"mediaType": MODEL, "digest": DIGEST, "size": -5}]}, "size -5"),
        ({"layers": [{"mediaType": MODEL, "digest": DIGEST, "size": True}]}, "size True"),
        ({"layers": [{"mediaType": MODEL, "digest": DIGEST, "size": "5"}]}, "size '5'"),
        ({"layers": [{"mediaType": MODEL, "digest": DIGEST, "size": 1 << 80}]}, "not enough disk space"),
    ],
)
def test_hostile_manifest(server, manifest, text):
    server.manifest(manifest)
    with pytest.raises(SourceError, match=text):
        sources.resolve("ollama:tiny")


def test_unknown_ollama_model(server):
    with pytest.raises(
        SourceError, match=r"ollama:nope:8b does not exist: 127\.0\.0\.1:\d+ answered 404; check the name"
    ):
        sources.resolve("ollama:nope:8b")


# ---- Hugging Face ----


@pytest.fixture
def hub(server, monkeypatch):
    """A fake hub: `hub(files)` publishes `{path: bytes or (bytes, stated sha256)}` as me/repo."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)

    def publish(files):
        siblings = []
        for path, data in files.items():
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append({"rfilename": path, "size": len(data), "blobId": "b", "lfs": lfs})
            server.blobs[f"/me/repo/resolve/{'c' * 40}/{path}"] = Blob(data)
        info = {"id": "me/repo", "sha": "c" * 40, "siblings": siblings}
        server.blobs["/api/models/me/repo"] = Blob(
            json.dumps(info).encode(), headers={"Content-Type": "application/json"}
        )
        return info

    return publish


def test_hf_takes_the_only_model(hub, server):
    hub({"README.md": b"hello", "mmproj-model.gguf": b"GGUFxx", "sub/tiny.gguf": DATA})
    path = sources.resolve("hf:me/repo")
    assert (path.name, path.read_bytes()) == ("tiny.gguf", DATA)
    requests = len(server.requests)
    assert sources.resolve("hf:me/repo") == sources.resolve("hf:me/repo:sub/tiny.gguf") == path
    assert len(server.requests) == requests
    assert server.auth[-1] == "Bearer hf_secret"


def test_hf_login_does_not_travel_to_another_host(hub, server):
    hub({"tiny.gguf": DATA})
    elsewhere = server.url.replace("127.0.0.1", "localhost")
    server.blobs[f"/me/repo/resolve/{'c' * 40}/tiny.gguf"] = Blob(
        b"", status=[302], headers={"Location": elsewhere + "/s"}
    )
    server.blobs["/s"] = Blob(DATA)
    assert sources.resolve("hf:me/repo").read_bytes() == DATA
    assert server.auth[-2:] == ["Bearer hf_secret", None]


def test_hf_split_model_and_resume(hub, server):
    parts = {f"m-{n:05d}-of-00003.gguf": model_bytes(60_000, n) for n in (1, 2, 3)}
    hub(parts)
    second = server.blobs[f"/me/repo/resolve/{'c' * 40}/m-00002-of-00003.gguf"]
    second.cut = [7]
    with pytest.raises(SourceError, match="broke off"):
        sources.resolve("hf:me/repo")
    second.cut = [None]
    before = len(server.requests)
    path = sources.resolve("hf:me/repo")
    assert path.name == "m-00001-of-00003.gguf"
    assert [(path.parent / name).read_bytes() for name in parts] == list(parts.values())
    assert [r for _, r in server.requests[before:]] == [None, "bytes=35-", None]  # the listing, then parts 2 and 3
    assert [entry.name for entry in sources.installed()] == ["m"]


def test_hf_wrong_hash(hub, server):
    hub({"tiny.gguf": DATA})
    server.blobs[f"/me/repo/resolve/{'c' * 40}/tiny.gguf"].data = DATA[:-1] + b"?"
    with pytest.raises(SourceError, match=r"hf:me/repo:tiny\.gguf: tiny\.gguf arrived with SHA-256"):
        sources.resolve("hf:me/repo")


PATHS = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-q8_0.gguf", "big/m-F16-00001-of-00002.gguf"]
PATHS.append("big/m-F16-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (PATHS, None, ["m-Q4_K_M.gguf"]),
        (PATHS, "Q8_0", ["m-q8_0.gguf"]),
        (PATHS, "f16", PATHS[-2:]),
        (PATHS, "m-Q2_K.gguf", ["m-Q2_K.gguf"]),
        (PATHS, "m-F16-00001-of-00002.gguf", PATHS[-2:]),
        (PATHS, "Q4_K", "has no model that fits 'Q4_K'; name one: hf:r:FILE with FILE of m-Q2_K.gguf, m-Q4_K_M.gguf"),
        (["a.gguf", "b.gguf"], None, "has more than one model to take by itself"),
        (["a.gguf", "b-Q8_0.gguf"], None, ["b-Q8_0.gguf"]),
        (PATHS[:-1], "F16", r"has 00002 parts, the repository holds only: big/m-F16-00001-of-00002\.gguf"),
        ([], None, r"holds no \.gguf file"),
    ],
)
def test_hf_choice(paths, wanted, chosen):
    if isinstance(chosen, str):
        with pytest.raises(SourceError, match=chosen):
            hf._choose("r", paths, wanted)
    else:
        assert hf._choose("r", paths, wanted) == chosen


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (404, "RepoNotFound", "does not exist, or is private; check the name, or log in"),
        (401, "RepoNotFound", "does not exist, or is private"),
        (403, "GatedRepo", "asks you to accept its terms"),
        (418, "", "the hub answered 418"),
    ],
)
def test_hf_refusals(hub, server, status, code, text):
    server.blobs["/api/models/me/repo"] = Blob(b"{}", status=[status], headers={"X-Error-Code": code})
    with pytest.raises(SourceError, match=text):
        sources.resolve("hf:me/repo")


def test_hf_offline(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(SourceError, match=r"cannot reach the Hugging Face hub \(.*check the network"):
        sources.resolve("hf:me/repo")


@pytest.mark.parametrize(
    "change", [{"size": None}, {"size": -1}, {"lfs": {"sha256": "../x", "size": 1, "pointerSize": 1}}]
)
def test_hf_hostile_listing(hub, server, change):
    info = hub({"tiny.gguf": DATA})
    info["siblings"][0].update(change)
    server.blobs["/api/models/me/repo"].data = json.dumps(info).encode()
    with pytest.raises(SourceError, match="hf:me/repo: the hub states"):
        sources.resolve("hf:me/repo")
