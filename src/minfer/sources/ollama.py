"""`ollama:name[:tag]`: a model of the Ollama registry (manifest, then the blob that holds the GGUF file)."""

from __future__ import annotations

import json
import re

from minfer.errors import SourceError
from minfer.sources import http
from minfer.sources.http import Remote, RemoteFile

REGISTRY = "https://registry.ollama.ai"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_MANIFEST_LIMIT = 1 << 20  # bytes; real ones have about one thousand


def locate(name: str, tag: str) -> Remote:
    """Read the manifest of `[namespace/]name:tag` and return where its GGUF blob is.

    Raises `SourceError` when the registry cannot be reached, has no such model, or stores it in another format.
    """
    short = f"{name.removeprefix('library/')}:{tag}"
    url = f"{REGISTRY}/v2/{name if '/' in name else 'library/' + name}"
    manifest = _manifest(f"{url}/manifests/{tag}", short)
    layers = manifest.get("layers")
    layers = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    models = [layer for layer in layers if layer.get("mediaType") == _MODEL]
    if len(models) != 1:
        kinds = sorted({str(layer.get("mediaType"))[:80] for layer in layers})
        raise SourceError(
            f"ollama:{short} has {len(models)} GGUF layers, expected 1; "
            f"its manifest lists: {', '.join(kinds) or 'none'}; minfer reads models that are stored as one GGUF file"
        )
    if any(layer.get("mediaType") == _ADAPTER for layer in layers):
        raise SourceError(
            f"ollama:{short} is a model with a LoRA adapter beside it, which minfer does not apply; "
            "name the base model, or one with the adapter merged"
        )
    digest, size = models[0].get("digest"), models[0].get("size")
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", digest) if isinstance(digest, str) else None
    if match is None or not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise SourceError(f"ollama:{short}: the manifest's model layer has digest {digest!r:.90} and size {size!r:.30}")
    file = f"{name.rpartition('/')[2]}-{tag}.gguf"
    return Remote(f"ollama:{short}", (RemoteFile(file, f"{url}/blobs/{digest}", size, match[1]),))


def _manifest(url: str, short: str) -> dict[str, object]:
    import httpx

    where = url.split("/")[2]
    body = b""
    try:
        with http.client() as client, client.stream("GET", url, headers={"Accept": _MANIFEST}) as response:
            if response.status_code != 200:
                raise http.refused(response.status_code, where, f"ollama:{short}")
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MANIFEST_LIMIT:
                    raise SourceError(f"ollama:{short}: the manifest from {where} exceeds {_MANIFEST_LIMIT} bytes")
    except httpx.HTTPError as error:
        raise http.unreachable(where, error) from error
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"ollama:{short}: the manifest from {where} is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise SourceError(f"ollama:{short}: the manifest from {where} is not a JSON object")
    return manifest
