"""Fetch files over HTTP: resumed with Range, bounded retries, size and SHA-256 checked."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minfer.errors import SourceError
from minfer.sources import cache
from minfer.sources.cache import Fetched, Progress, human

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import httpx

TRIES = 5  # in a row that bring less than GAIN bytes
GAIN = 1 << 20
_BACKOFF = 0.5  # seconds, doubled at each try
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    url: str
    size: int  # bytes
    sha256: str | None  # None: the server states none, and the size is all there is to check


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a model's files are. `source` names exactly these files, whatever the user asked for."""

    source: str
    files: tuple[RemoteFile, ...]
    headers: Mapping[str, str] = field(default_factory=dict)


class _TryAgain(Exception):
    """This try ended early; another may do better."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def client() -> httpx.Client:
    """An HTTP client with bounded waits; proxies and certificates as the user's environment says."""
    import httpx

    from minfer.sources import USER_AGENT

    return httpx.Client(
        follow_redirects=True,
        timeout=httpx.Timeout(30.0, connect=10.0),
        # A compressed transfer would make byte offsets mean something else.
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
    )


def unreachable(where: str, error: Exception) -> SourceError:
    return SourceError(
        f"cannot reach {where} ({type(error).__name__}: {error}); check the network and proxy settings, "
        "or use a model that is on this machine: minfer list"
    )


def refused(status: int, where: str, what: str) -> SourceError:
    """The error for an HTTP status that another try will not change."""
    if status == 404:
        return SourceError(f"{what} does not exist: {where} answered 404; check the name")
    if status in (401, 403):
        return SourceError(f"{what} needs a login or is not public: {where} answered {status}")
    return SourceError(f"{what} could not be fetched: {where} answered {status}, expected 200")


def fetch(remote: Remote, staging: Path, progress: Progress) -> list[Fetched]:
    """Fetch every file of a model into `staging`; what is there from an earlier try is continued.

    Raises `SourceError` when the network, the server, the disk or the content is not as it must be. The partial file
    stays for the next try, unless its content was wrong.
    """
    total = sum(file.size for file in remote.files)
    # A partial file is named after its content, so it is only ever continued with more of the same.
    paths = [staging / f"{index}-{_identity(file)}.part" for index, file in enumerate(remote.files)]
    have = sum(min(_size(path), file.size) for path, file in zip(paths, remote.files, strict=True))
    cache.require_space(staging, total - have, remote.source)
    done, fetched = 0, []
    with client() as http:
        for file, path in zip(remote.files, paths, strict=True):

            def report(position: int, before: int = done, name: str = file.name) -> None:
                progress(before + position, total, f"fetching {name}")

            digest = _fetch_verified(http, file, path, remote, report, progress)
            fetched.append(Fetched(path, file.name, digest))
            done += file.size
    return fetched


def _fetch_verified(
    http: httpx.Client, file: RemoteFile, path: Path, remote: Remote, report: _Report, progress: Progress
) -> str:
    """Fetch one file and check it. A resumed file that turns out wrong is fetched once more from its start:
    the first part may stem from another version, or from a transfer that was damaged."""
    while True:
        resumed = path.exists()
        _fetch_file(http, file, path, remote, report)
        digest = cache.sha256_of(path, progress, f"checking {file.name}")
        if file.sha256 in (None, digest):
            return digest
        path.unlink()
        if not resumed:
            raise SourceError(
                f"{remote.source}: {file.name} arrived with SHA-256 {digest}, expected {file.sha256}; "
                "the file was dropped. Try again; if it stays so, the server's copy is damaged"
            )


def _fetch_file(http: httpx.Client, file: RemoteFile, path: Path, remote: Remote, report: _Report) -> None:
    import httpx

    failures = 0
    while (have := _size(path)) != file.size:
        if have > file.size:
            path.unlink()
            have = 0
        report(have)
        try:
            _stream(http, file, path, have, remote, report)
        except (_TryAgain, httpx.TransportError, httpx.InvalidURL, httpx.TooManyRedirects) as error:
            gained = _size(path) - have
            if isinstance(error, httpx.ConnectError) and have + gained == 0:
                raise unreachable(_host(file.url), error) from error
            failures = 0 if gained >= GAIN else failures + 1
            if failures >= TRIES or not isinstance(error, (_TryAgain, httpx.TransportError)):
                raise SourceError(
                    f"{remote.source}: the transfer of {file.name} from {_host(file.url)} broke off "
                    f"{failures} times in a row ({type(error).__name__.lstrip('_')}: {error}); "
                    f"{human(_size(path))} of {human(file.size)} are kept, run the same command to go on"
                ) from error
            wait = error.wait if isinstance(error, _TryAgain) else 0.0
            time.sleep(max(wait, _BACKOFF * 2 ** max(failures - 1, 0)))


def _stream(http: httpx.Client, file: RemoteFile, path: Path, have: int, remote: Remote, report: _Report) -> None:
    """One request; appends to `path` from offset `have`."""
    headers = dict(remote.headers)
    if have:
        headers["Range"] = f"bytes={have}-"
    with http.stream("GET", file.url, headers=headers) as response:
        status = response.status_code
        if status in _TRANSIENT:
            retry_after = response.headers.get("Retry-After", "")
            raise _TryAgain(f"HTTP {status}", min(float(retry_after), 30.0) if retry_after.isdecimal() else 0.0)
        if status == 416 or (status == 206 and not _continues(response.headers.get("Content-Range"), have, file.size)):
            path.unlink(missing_ok=True)
            raise _TryAgain(f"HTTP {status} with Content-Range {response.headers.get('Content-Range')!r}")
        if status not in (200, 206):
            raise refused(status, _host(file.url), file.name)
        position = have if status == 206 else 0  # 200: the server ignored Range and sends everything
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and position + int(length) != file.size:
            raise SourceError(
                f"{remote.source}: {_host(file.url)} offers {position + int(length)} bytes as {file.name}, "
                f"expected {file.size}; the model may have just changed, try again"
            )
        with path.open("r+b" if path.exists() else "wb") as out:
            out.seek(position)
            out.truncate()
            for chunk in response.iter_raw():
                position += len(chunk)
                if position > file.size:
                    path.unlink()
                    raise SourceError(
                        f"{remote.source}: {_host(file.url)} sends more than the {file.size} bytes of {file.name}; "
                        "the file was dropped"
                    )
                out.write(chunk)
                report(position)
        if position < file.size:
            raise _TryAgain(f"the body ended after {position} of {file.size} bytes")


def _continues(content_range: str | None, have: int, size: int) -> bool:
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range or "")
    return match is not None and int(match[1]) == have and match[3] in ("*", str(size))


def _identity(file: RemoteFile) -> str:
    return file.sha256 or hashlib.sha256(file.url.encode()).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url).netloc.rpartition("@")[2]


if TYPE_CHECKING:
    from typing import Protocol

    class _Report(Protocol):
        def __call__(self, position: int) -> None: ...
