"""What several tests share: an engine over a file, and tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.engine.engine import Engine
from minfer.engine.place import place
from minfer.gguf import open_model
from minfer.gguf.writer import Tensor, typed, write_model
from minfer.kv import Rows
from minfer.models import load_architecture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minfer.graph import Placement

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
TINY_MODELS = sorted(path.stem for path in TINY.glob("*.gguf"))


def open_engine(
    path: Path,
    *,
    n_ctx: int = 64,
    device: str = "reference",
    kv_format: str = "f32",
    placement: Placement | None = None,
    unfused: frozenset[str] = frozenset(),
) -> Engine:
    file = open_model(path)
    arch = load_architecture(file)
    where = placement or place(arch, device, kv_format)
    return Engine(file, arch, where, n_ctx=n_ctx, kv_format=kv_format, unfused=unfused)


def span_rows(positions: Sequence[int], first_cell: int = 0) -> Rows:
    """Tokens at any positions in consecutive cells, each reading the cells up to its own."""
    cells = np.arange(first_cell, first_cell + len(positions), dtype=np.int32)
    window = np.stack([np.full_like(cells, first_cell), cells + 1], axis=1).reshape(-1)
    return Rows(np.asarray(positions, np.int32), cells, window, 2)


Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


def edited(path: Path, target: Path, edit: Edit) -> Path:
    """A copy of a model with its metadata and tensors changed."""
    with open_model(path) as model:
        metadata: dict[str, Any] = {k: typed(v, model.value_types[k]) for k, v in model.metadata.items()}
        tensors = {
            name: Tensor(name, info.format, info.shape, model.data(name).copy()) for name, info in model.tensors.items()
        }
    edit(metadata, tensors)
    write_model(target, metadata, list(tensors.values()))
    return target


def f32(name: str, *shape: int) -> Tensor:
    return Tensor.of(name, np.zeros(shape[::-1], np.float32))


def put(tensors: dict[str, Tensor], tensor: Tensor) -> None:
    tensors[tensor.name] = tensor
