"""A model file, or all parts of a split one, mapped into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

import numpy as np

from minfer.errors import ModelFileError, RequestError
from minfer.gguf.header import Header, TensorInfo, clip, read_header
from minfer.gguf.split import check_parts, part_paths, split_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minfer.gguf.values import MetaValue, ValueType
    from minfer.quants.format import U8


class ModelFile:
    """A GGUF model: metadata, tensors, and their bytes in place. A context manager.

    Metadata and tensor entries stay valid after `close`; arrays from `data` and `buffer` keep their part mapped for
    as long as they live. A file that another program shortens while it is mapped is outside what can be checked: the
    system kills a process that touches the missing pages.
    """

    path: Path  # as it was asked for
    parts: Sequence[Path]  # one, or all parts of a split model in order
    version: int
    alignment: int
    metadata: Mapping[str, MetaValue]  # of the first part
    value_types: Mapping[str, ValueType]  # as written in the file; of an array, its elements' type
    tensors: Mapping[str, TensorInfo]  # in file order

    def __init__(self, path: Path, parts: Sequence[Path], headers: Sequence[Header], maps: Sequence[mmap.mmap]) -> None:
        self.path = path
        self.parts = tuple(parts)
        self.version = headers[0].version
        self.alignment = headers[0].alignment
        self.metadata = MappingProxyType(headers[0].metadata)
        self.value_types = MappingProxyType(headers[0].value_types)
        self.tensors = MappingProxyType({t.name: t for header in headers for t in header.tensors.values()})
        self._maps = list(maps)
        self._buffers = [np.frombuffer(m, np.uint8) for m in maps]

    def buffer(self, part: int) -> U8:
        """All bytes of one part, read-only uint8 [file size]: the mapping that a device can share."""
        if not self._buffers:
            raise RequestError(f"{self.path}: the model file is closed")
        return self._buffers[part]

    def data(self, name: str) -> U8:
        """The bytes of one tensor, a read-only uint8 view [n_rows, row_bytes] of the mapping."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path}: no tensor {clip(name)} among its {len(self.tensors)} tensors")
        raw = self.buffer(tensor.part)[tensor.offset : tensor.offset + tensor.nbytes]
        return raw.reshape(tensor.n_rows, tensor.row_bytes)

    def close(self) -> None:
        """Let go of the mapping; it goes when the last array over it does. Twice is fine."""
        self._buffers.clear()
        for mapping in self._maps:
            _release(mapping)
        self._maps.clear()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ModelFile({str(self.path)!r}, {len(self.tensors)} tensors, {len(self.parts)} parts)"


def _release(mapping: mmap.mmap) -> None:
    """Unmap now, or with the last array that looks at the mapping (one may sit in a traceback)."""
    with contextlib.suppress(BufferError):
        mapping.close()


def _map(path: Path) -> mmap.mmap:
    """The whole file, read-only."""
    try:
        # Asked before opening: opening a FIFO would wait for a writer.
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a directory, expected a GGUF file; name the file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is not a regular file, expected a GGUF file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelFileError(f"{path}: the file is empty, expected a GGUF file; fetch it again")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file, expected a GGUF file") from None
    except PermissionError:
        raise ModelFileError(f"{path}: permission denied, expected a readable GGUF file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be opened: {error}") from None


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF file, version 2 or 3; any part of a split model opens all of it.

    Raises ModelFileError, whose text says what is wrong, where (file, key, tensor, byte) and what was expected.
    """
    asked = Path(path)
    with contextlib.ExitStack() as undo:

        def open_part(part_path: Path, index: int) -> tuple[mmap.mmap, Header]:
            mapping = _map(part_path)
            undo.callback(_release, mapping)
            return mapping, read_header(mapping, part_path, index)

        mapping, header = open_part(asked, 0)
        if split_count(header, asked) == 1:
            paths, maps, headers = [asked], [mapping], [header]
        else:
            paths = part_paths(header, asked)
            opened = [open_part(part_path, index) for index, part_path in enumerate(paths)]
            _release(mapping)
            maps, headers = [m for m, _ in opened], [h for _, h in opened]
            check_parts(headers, paths)
        model = ModelFile(asked, paths, headers, maps)
        undo.pop_all()
        return model
