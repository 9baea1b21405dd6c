"""Which kernel runs what, by shape: one table with its thresholds, which the docs print."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from minfer.backends.gpu.lower.context import Profile


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for matrix products of up to `max_tokens`: `rows` by `tokens` results a simdgroup (or a threadgroup)."""

    kernel: str
    tier: str
    max_tokens: int
    rows: int
    tokens: int
    why: str


MANY = 1 << 30

#: A norm joins products of up to this many tokens; beyond, each tile of a product would compute it again.
NORM_MAX_TOKENS = 8
#: Tiers that a device must ask for (`Profile.extra`): they pay where that device's hardware is.
EXTRA = ("wide", "mma")

#: In order; the first whose `max_tokens` is reached and whose tier is on. The last row serves every token count.
PRODUCTS = (
    Choice(
        "project_wide",
        "wide",
        1,
        4,
        1,
        "CUDA: rows are copied ahead of the arithmetic; of super-blocks 2 x 1",
    ),
    Choice("project_t1", "matvec", 1, 4, 1, "bound by weight bytes: each is read once"),
    Choice("project_t2", "matvec", 2, 4, 2, "the same weights for two tokens"),
    Choice("project_t4", "matvec", 4, 2, 4, "the same weights for four tokens"),
    Choice("project_t8", "matvec", 8, 2, 8, "the same weights for eight tokens"),
    Choice(
        "gemm_mma",
        "mma",
        MANY,
        64,
        128,
        "CUDA: tensor cores, halves; smaller tiles, and two parts of the depth, where those fill the GPU",
    ),
    Choice("gemm", "gemm", MANY, 64, 32, "bound by arithmetic: simdgroup matrices; no norm prologue"),
    Choice("project_t8", "any", MANY, 2, 8, "eight tokens at a time, where gemm is off"),
)

#: Query heads that share the keys of one KV head in a threadgroup: the first that holds the group, else the last.
HEAD_GROUPS = (1, 2, 4, 8)

#: Up to this many queries, attention is split over the rows of the window.
SPLIT_MAX_QUERIES = 8
#: The most splits on any device; how many rows a split has is the profile's.
MAX_SPLITS = 128
#: From this many queries on, attention is tiled: 8 queries share the keys. Causal windows are of one sequence; fewer
#: spans are taken for a token each of several sequences, and maps for rows that are not side by side: there each query
#: reads its own rows for itself.
TILED_MIN_QUERIES = {0: 9, 2: 33}
#: Up to this many values a head, two simdgroups can share rows of attention by tensor cores.
SHARING_MAX_HEAD = 128

#: Tokens and weight rows of a tile of `gemm_mma`, largest first.
MMA_TILES = ((128, 64), (64, 64), (32, 32))

TIERS = ("gemm", "split", "tiled", *EXTRA)


def product(profile: Profile, n_tokens: int, *, coded: bool = True, mixed: bool = False) -> Choice:
    """The kernel for a matrix product of `n_tokens`; `coded` says that all weights are blocks of codes, none plain,
    `mixed` that gate and up are of two types."""
    for choice in PRODUCTS:
        if n_tokens > choice.max_tokens or choice.tier in profile.off:
            continue
        if choice.tier in EXTRA and choice.tier not in profile.extra:
            continue
        if choice.tier == "wide" and not coded:
            continue
        if choice.tier == "mma" and mixed:
            continue
        if choice.tier in ("gemm", "mma") and not profile.simd_matrix:
            continue
        return choice
    raise AssertionError("the last row serves everything")


def mma_tile(profile: Profile, n_tokens: int, rows: int, nbytes: Callable[[int, int], int]) -> tuple[int, int, int]:
    """Tokens and rows of a tile, and parts of its depth, each with threads of its own: two where there are less than
    two tiles for each core and a core has room for two threadgroups of them. The largest tile whose parts are enough
    for each core is taken, else the smallest; one of more than twice the tokens is left out, as is one that does not
    fit. `nbytes` is the threadgroup memory that a part of a tile takes."""
    most = profile.max_threadgroup_bytes
    for tile in MMA_TILES:
        tiles = -(-n_tokens // tile[0]) * -(-rows // tile[1])
        parts = 2 if tiles < 2 * profile.cores and 4 * nbytes(*tile) <= most else 1
        if tiles * parts >= profile.cores and 2 * n_tokens > tile[0] and nbytes(*tile) <= most:
            break
    return *tile, parts


def head_group(group: int, *, alone: bool = False) -> int:
    """Query heads a threadgroup, for `group` query heads a KV head; each `alone` where keys are few and so are they."""
    return 1 if alone else next((g for g in HEAD_GROUPS if group <= g), HEAD_GROUPS[-1])


def bucket(profile: Profile, n_queries: int, n_rows: int, n_cells: int) -> int:
    """The rows that windows may have in a program for windows of up to `n_rows`: attention is split for so many.

    Twice as many in each bucket as in the one before. A step whose attention is not split has one program.
    """
    if n_queries > SPLIT_MAX_QUERIES:
        return n_cells
    rows = profile.whole_rows
    while rows < n_rows:
        rows *= 2
    return min(rows, n_cells)


def splits(profile: Profile, n_queries: int, n_rows: int) -> int:
    """Into how many parts windows of up to `n_rows` rows are split."""
    if n_queries > SPLIT_MAX_QUERIES or n_rows <= profile.whole_rows or "split" in profile.off:
        return 1
    return min(profile.max_splits, -(-n_rows // profile.split_rows))


def wide_attention(profile: Profile, n_queries: int) -> bool:
    """Whether attention of few queries takes eight simdgroups a threadgroup."""
    return n_queries <= SPLIT_MAX_QUERIES and "wide" in profile.extra and "wide" not in profile.off


def left_out(profile: Profile) -> frozenset[str]:
    """Families of kernels that a device never launches: those of the tiers that it does not ask for."""
    families = {(choice.tier, choice.kernel) for choice in PRODUCTS if choice.tier in EXTRA}
    families |= {("wide", "attention_wide"), ("mma", "attention_mma")}
    return frozenset(family for tier, family in families if tier not in profile.extra)


def tiled(profile: Profile, n_queries: int, window: int) -> bool:
    """Whether attention runs over tiles of queries."""
    many = window in TILED_MIN_QUERIES and n_queries >= TILED_MIN_QUERIES[window]
    return many and profile.simd_matrix and "tiled" not in profile.off


def attention_mma(profile: Profile, n_queries: int, window: int) -> bool:
    """Whether tensor cores multiply the tiles."""
    return tiled(profile, n_queries, window) and "mma" in profile.extra and "mma" not in profile.off


def sharing(profile: Profile, head_dim: int, n_threadgroups: int) -> int:
    """Simdgroups that share the rows of attention by tensor cores: two where no core of the GPU has two threadgroups. A
    tile of heads beyond `SHARING_MAX_HEAD` has too few keys for two."""
    return 2 if n_threadgroups <= profile.cores and head_dim <= SHARING_MAX_HEAD else 1


def tiers_off(text: str | None = None) -> frozenset[str]:
    """Tiers switched off by `MINFER_KERNELS`, as in `gemm:off,attn:generic`; `RequestError` for another word."""
    text = os.environ.get("MINFER_KERNELS", "") if text is None else text
    off: set[str] = set()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        if part == "attn:generic":
            off |= {"split", "tiled"}
        elif name in TIERS and value == "off":
            off.add(name)
        else:
            known = ", ".join(f"{tier}:off" for tier in TIERS)
            raise RequestError(f"MINFER_KERNELS: {part!r} is none of {known}, attn:generic")
    return frozenset(off)
