"""The table of weight formats. `FORMATS` is what minfer computes with; `KNOWN` is every ggml type it can measure.

KV row formats are in `minfer.quants.kv`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from minfer.errors import ModelFileError, UnsupportedError
from minfer.quants.format import Format
from minfer.quants.iquants import IQ4_NL, IQ4_XS
from minfer.quants.kquants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from minfer.quants.kv import KV_FORMATS, KvFormat, kv_format
from minfer.quants.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from minfer.quants.mx import MXFP4
from minfer.quants.plain import BF16, F16, F32
from minfer.quants.sizes import REMOVED, SIZE_ONLY

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMATS", "KNOWN", "KV_FORMATS", "Format", "KvFormat", "by_id", "known_by_id", "kv_format"]

_COMPUTED = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4)

FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _COMPUTED})
KNOWN: Mapping[int, Format] = MappingProxyType({f.id: f for f in (*_COMPUTED, *SIZE_ONLY)})


def known_by_id(type_id: int) -> Format:
    """The format of this ggml type number, size-only ones included.

    Raises ModelFileError for a number that ggml has retired or never given out.
    """
    found = KNOWN.get(type_id)
    if found is not None:
        return found
    if type_id in REMOVED:
        name, instead = REMOVED[type_id]
        raise ModelFileError(
            f"tensor type {type_id} is {name}, which ggml has removed; "
            f"convert the model again, for instance to {instead}"
        )
    raise ModelFileError(
        f"unknown tensor type {type_id}: expected a ggml type up to {max(KNOWN)}; "
        "the file is damaged, or newer than this version of minfer"
    )


def by_id(type_id: int) -> Format:
    """The format of this ggml type number, if minfer computes with it.

    Raises UnsupportedError for a known type that it does not, ModelFileError as `known_by_id`.
    """
    found = known_by_id(type_id)
    if not found.computes:
        raise UnsupportedError(
            f"tensor type {found.name} (ggml type {type_id}) is not supported; supported are {', '.join(FORMATS)}"
        )
    return found
