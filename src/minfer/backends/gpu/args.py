"""Argument structs, declared once: the bytes that a launch carries and the MSL text that its kernel reads them by."""

from __future__ import annotations

import struct
from dataclasses import dataclass

Number = int | float
Field = int | float | tuple[Number, ...]

_CODES = {"uint": "I", "int": "i", "float": "f"}


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct of 4-byte fields, so without padding: `(type, name, how many)`; more than one is an array."""

    name: str
    fields: tuple[tuple[str, str, int], ...]

    @property
    def nbytes(self) -> int:
        return 4 * sum(count for _, _, count in self.fields)

    def pack(self, **values: Field) -> bytes:
        """The struct's bytes, little-endian. Every field must be given, arrays in full."""
        if unknown := set(values) ^ {name for _, name, _ in self.fields}:
            raise ValueError(f"{self.name}: fields {sorted(unknown)} are missing or unknown")
        raw = b""
        for kind, name, count in self.fields:
            value = values[name]
            items = value if isinstance(value, tuple) else (value,)
            if len(items) != count:
                raise ValueError(f"{self.name}.{name} has {count} values, found {len(items)}")
            raw += struct.pack(f"<{count}{_CODES[kind]}", *items)
        return raw

    def unpack(self, raw: bytes) -> dict[str, Field]:
        """The fields of packed bytes, for printing."""
        flat = struct.unpack("<" + "".join(f"{count}{_CODES[kind]}" for kind, _, count in self.fields), raw)
        fields: dict[str, Field] = {}
        at = 0
        for _, name, count in self.fields:
            fields[name] = flat[at] if count == 1 else flat[at : at + count]
            at += count
        return fields

    @property
    def msl(self) -> str:
        """The declaration in MSL, with its size asserted."""
        lines = "\n".join(f"    {kind} {name}{f'[{count}]' if count > 1 else ''};" for kind, name, count in self.fields)
        return f'struct {self.name} {{\n{lines}\n}};\nstatic_assert(sizeof({self.name}) == {self.nbytes}, "size");\n'


def _declare(name: str, text: str) -> Struct:
    """From `type name, type name[count], ...`."""
    fields = []
    for part in text.split(","):
        kind, field = part.split()
        field, _, count = field.partition("[")
        fields.append((kind, field, int(count.rstrip("]") or 1)))
    return Struct(name, tuple(fields))


PROJECT = _declare("project_args", "uint n_in, uint n_out, uint n_tokens, uint rows[3], uint row_bytes[3], float eps")
EMBED = _declare("embed_args", "uint n_in, uint row_bytes")
COPY = _declare("copy_args", "uint n, uint start, uint extent[4], uint stride[4]")
MOVE = _declare("move_args", "uint source, uint target, uint count, uint words, uint strands")
ELEMENTWISE = _declare("elementwise_args", "uint n, float factor")
NORM = _declare("norm_args", "uint n, float eps")
TOP = _declare("top_args", "uint n, uint k")
HEADS = _declare(
    "heads_args", "uint n_head, uint n_kv_head, uint width, uint row_bytes, float magnitude, float q_eps, float k_eps"
)
ATTN = _declare(
    "attn_args",
    "uint n_head, uint n_kv_head, uint n_queries, uint n_splits, uint row_bytes, uint sliding, float scale, "
    "float softcap",
)

STRUCTS = {s.name: s for s in (PROJECT, EMBED, COPY, MOVE, ELEMENTWISE, NORM, TOP, HEADS, ATTN)}


def header() -> str:
    """The text of `args.h`."""
    return "#pragma once\n" + "".join(s.msl for s in STRUCTS.values())
