"""`minfer inspect`: what is in a model file, and what this machine can do with it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.backends import DEVICES
from minfer.cli.terminal import as_json, safe, style, table
from minfer.engine.model import DEFAULT_N_CTX
from minfer.engine.place import place
from minfer.errors import MinferError
from minfer.gguf import ModelFile, StringArray, open_model
from minfer.models import load_architecture
from minfer.sources.cache import human

if TYPE_CHECKING:
    from pathlib import Path

_SHOWN = 70  # characters of a text, and about as many of an array


def show(path: Path, *, tensors: bool, json: bool) -> None:
    """Print a model file. Raises `ModelFileError` where it cannot be read."""
    with open_model(path) as file:
        if json:
            print(as_json(describe(file)))
        else:
            print(as_text(file, tensors=tensors))


def describe(file: ModelFile) -> dict[str, Any]:
    """All of a file but the tensors' values, as plain data. Bytes that are not UTF-8 get replacement characters."""
    return {
        "path": str(file.path),
        "parts": [str(part) for part in file.parts],
        "bytes": _file_bytes(file),
        "version": file.version,
        "alignment": file.alignment,
        "parameters": sum(tensor.n_elements for tensor in file.tensors.values()),
        "runs": abilities(file),
        "metadata": {
            key: {"type": file.value_types[key].name.lower(), "value": _plain(value)}
            for key, value in file.metadata.items()
        },
        "tensors": {
            name: {"format": tensor.format.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            for name, tensor in file.tensors.items()
        },
    }


def abilities(file: ModelFile) -> dict[str, Any]:
    """For every device: None if it runs this model, else the reason; and the memory that a run takes."""
    try:
        arch = load_architecture(file)
    except MinferError as error:
        return {"devices": dict.fromkeys(DEVICES, str(error)), "memory": None}
    devices: dict[str, str | None] = {}
    for device in DEVICES:
        try:
            place(arch, device, "f32")
            devices[device] = None
        except MinferError as error:
            devices[device] = str(error)
    n_ctx = min(arch.n_ctx_train, DEFAULT_N_CTX)
    cell = 2 * 4 * arch.n_layer * arch.n_kv_head * arch.head_dim  # a key and a value row in f32
    memory = {
        "weights": sum(tensor.nbytes for tensor in file.tensors.values()),
        "kv_cache_f32": n_ctx * cell,
        "n_ctx": n_ctx,
        "n_ctx_train": arch.n_ctx_train,
        "machine": _memory(),
    }
    return {"devices": devices, "memory": memory}


def as_text(file: ModelFile, *, tensors: bool) -> str:
    """The same for a person: long values shortened, tensors summed by format unless all are wanted."""
    parameters = sum(tensor.n_elements for tensor in file.tensors.values())
    parts = f", {len(file.parts)} parts" if len(file.parts) > 1 else ""
    lines = [
        f"{file.path}: GGUF version {file.version}, {human(_file_bytes(file))}{parts}, {parameters:,} parameters, "
        f"alignment {file.alignment}",
        "",
        _title("Metadata"),
        table(
            [(safe(key), _kind(file, key), safe(_short(value))) for key, value in file.metadata.items()] or [("none",)]
        ),
        "",
        _title("Tensors"),
    ]
    if tensors:
        rows = [
            (safe(name), tensor.format.name, " x ".join(map(str, tensor.shape)) or "scalar", f"{tensor.nbytes:,} bytes")
            for name, tensor in file.tensors.items()
        ]
        lines += [table(rows, right=(3,)), ""]
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in file.tensors.values():
        count[tensor.format.name] += 1
        size[tensor.format.name] += tensor.nbytes
    sums = [(name, f"{count[name]} tensors", f"{total:,} bytes") for name, total in size.most_common()]
    lines += [table(sums, right=(1, 2)), "", _title("On this machine"), _abilities_text(abilities(file))]
    return "\n".join(lines)


def _abilities_text(able: dict[str, Any]) -> str:
    verdicts = able["devices"].items()
    rows = [(device, "runs it" if why is None else f"cannot run it: {safe(why)}") for device, why in verdicts]
    if memory := able["memory"]:
        machine = "not known" if memory["machine"] is None else human(memory["machine"])
        rows.append(
            (
                "memory",
                f"{human(memory['weights'])} weights + {human(memory['kv_cache_f32'])} KV cache "
                f"({memory['n_ctx']:,} tokens in f32; trained for {memory['n_ctx_train']:,}), of {machine}",
            )
        )
    return table(rows)


def _title(text: str) -> str:
    return style(text, "bold", sys.stdout)


def _file_bytes(file: ModelFile) -> int:
    return sum(part.stat().st_size for part in file.parts)


def _memory() -> int | None:
    """Bytes of memory in this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _kind(file: ModelFile, key: str) -> str:
    kind = file.value_types[key].name.lower()
    value = file.metadata[key]
    return f"{kind}[{len(value)}]" if isinstance(value, (np.ndarray, StringArray)) else kind


def _short(value: object) -> str:
    """A metadata value on one line."""
    if isinstance(value, (np.ndarray, StringArray)):
        text = ", ".join(_text(item) if isinstance(item, bytes) else str(item) for item in list(value[:12]))
        return f"[{_cut(text, len(value) > 12)}]"
    if isinstance(value, bytes):
        value = _text(value)
    if isinstance(value, str):
        return _cut(value.replace("\n", "\\n"), False)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str, more: bool) -> str:
    if len(text) > _SHOWN:
        return f"{text[:_SHOWN]}..."
    return text + (", ..." if more else "")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _plain(value: object) -> object:
    if isinstance(value, StringArray):
        return [_text(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return _text(value)
    return value
