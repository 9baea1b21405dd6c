"""`hf:owner/repo[:file]`: a GGUF file of a Hugging Face repository.

The library finds the files, their sizes and hashes, and the user's login; the bytes go through our own transfer,
because the library starts again from nothing after an interrupted download.
"""

from __future__ import annotations

import re
from typing import Any

from minfer.errors import SourceError
from minfer.sources.http import Remote, RemoteFile, unreachable

_PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")  # what llama.cpp takes when a repository has several
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def locate(repo: str, wanted: str | None) -> Remote:
    """Choose the file of `repo` that `wanted` names: a file, a quantization such as `Q8_0`, or None.

    None takes the only model there is, else Q4_K_M, Q4_0 or Q8_0. A split model is one model: all its parts.
    Raises `SourceError` when the hub cannot be reached, the repository or file does not exist or needs a login, or
    the choice is not clear.
    """
    try:
        info, headers, link = _ask_hub(repo)
    except Exception as error:  # the library's errors differ between its versions, and its HTTP client's too
        raise _explain(repo, error) from error
    files = {file.rfilename: file for file in info.siblings or () if _is_model(file.rfilename)}
    chosen = _choose(repo, sorted(files), wanted)
    remote = []
    for path in chosen:
        size, lfs = files[path].size, files[path].lfs
        if not isinstance(size, int) or size <= 0:
            raise SourceError(f"hf:{repo}: the hub states no size for {path} (found {size!r}); try again later")
        digest = str(lfs["sha256"]) if lfs else None
        if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
            raise SourceError(f"hf:{repo}: the hub states {digest[:80]!r} as the SHA-256 of {path}")
        remote.append(RemoteFile(path.rpartition("/")[2], link(path, info.sha), size, digest))
    return Remote(f"hf:{repo}:{chosen[0]}", tuple(remote), headers)


def _ask_hub(repo: str) -> tuple[Any, dict[str, str], Any]:
    from huggingface_hub import HfApi, constants, get_token, hf_hub_url

    info = HfApi().model_info(repo, files_metadata=True, timeout=20)
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return info, headers, lambda path, commit: hf_hub_url(repo, path, revision=commit)


def _explain(repo: str, error: Exception) -> SourceError:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return SourceError(f"hf:{repo} asks you to accept its terms: open its page, then log in with: hf auth login")
    if kind == "RepositoryNotFoundError":
        return SourceError(f"hf:{repo} does not exist, or is private; check the name, or log in with: hf auth login")
    if kind == "HFValidationError":
        return SourceError(f"hf:{repo} is not a repository name: {error}; expected hf:owner/repo[:file]")
    if kind == "OfflineModeIsEnabled":
        return SourceError(f"hf:{repo} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it; unset it")
    response = getattr(error, "response", None)
    if response is not None:
        return SourceError(f"hf:{repo}: the hub answered {getattr(response, 'status_code', '?')}; try again later")
    return unreachable("the Hugging Face hub", error)


def _is_model(path: str) -> bool:
    # A vision projector is an extra of a model, not a model.
    name = path.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not name.startswith(("mmproj", ".")) and "\\" not in path


def _choose(repo: str, paths: list[str], wanted: str | None) -> list[str]:
    """The files of the one model that is meant, parts in order."""
    models: dict[str, list[str]] = {}  # first file -> its files
    for path in paths:
        match = _PART.fullmatch(path)
        models.setdefault(f"{match[1]}-00001-of-{match[3]}.gguf" if match else path, []).append(path)
    if not models:
        raise SourceError(f"hf:{repo} holds no .gguf file; look for a repository of the same model that ends in -GGUF")
    if wanted is None:
        hits = list(models)
        for quantization in _PREFERRED:
            if len(hits) == 1:
                break
            hits = [path for path in models if _is_quantized(path, quantization)] or list(models)
    elif wanted.lower().endswith(".gguf"):
        hits = [path for path in models if wanted in (path, path.rpartition("/")[2])]
    else:
        hits = [path for path in models if _is_quantized(path, wanted)]
    if len(hits) != 1:
        found = "no" if not hits else "more than one"
        raise SourceError(
            f"hf:{repo} has {found} model {f'that fits {wanted!r}' if wanted else 'to take by itself'}; "
            f"name one: hf:{repo}:FILE with FILE of {', '.join(list(models)[:40])}"
        )
    chosen = models[hits[0]]
    match = _PART.fullmatch(hits[0])
    if match and chosen != [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]:
        raise SourceError(f"hf:{repo}: {hits[0]} has {match[3]} parts, the repository holds only: {', '.join(chosen)}")
    return chosen


def _is_quantized(path: str, quantization: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(quantization.lower())}(?![a-z0-9_])", path.lower()) is not None
