"""The vocabulary of a GGUF file: `tokenizer.ggml.*` read strictly, before any tokenizer sees it.

Key names and token types are those of the GGUF specification (ggml `docs/gguf.md`) and llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.errors import ModelFileError
from minfer.gguf import StringArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metadata = Mapping[str, Any]
PREFIX = "tokenizer.ggml."


class MissingPreTokenizerWarning(UserWarning):
    """The file does not say how to cut text into words; the named default was assumed and may be wrong."""


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, as SentencePiece numbers its piece types."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn, known by their text because files seldom name them all. Converters have typed some of them as
# normal text; no prose contains these, so their type is corrected.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
# These also occur as ordinary text (`</s>` is HTML's strike-through, and a piece of Gemma's and Qwen's vocabularies):
# they count only where the file types them as control tokens.
_TURN_ENDS_IF_CONTROL = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<reponame>", "<fim_pad>", "<fim-pad>")


def _kind(value: object) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def _refuse(key: str, found: str, expected: str) -> ModelFileError:
    return ModelFileError(f"{key}: found {found}, expected {expected}; the file's tokenizer cannot be trusted")


def get_string(metadata: Metadata, key: str) -> str | None:
    """The string under `key`, or None where it is missing. Raises ModelFileError if it is not a string."""
    value = metadata.get(key)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if value is not None and not isinstance(value, str):
        raise _refuse(key, _kind(value), "a string")
    return value


def get_flag(metadata: Metadata, key: str, default: bool) -> bool:
    """The boolean under `key`, or `default`. Raises ModelFileError if it is not a boolean."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | np.bool_):
        raise _refuse(key, _kind(value), "a boolean")
    return bool(value)


def get_strings(metadata: Metadata, key: str) -> StringArray:
    """The array of strings under `key` as bytes. Raises ModelFileError if it is missing or holds anything else."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"{key} is missing: the file has no usable tokenizer; convert the model again")
    if isinstance(value, StringArray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refuse(key, _kind(value), "an array of strings")
    kinds = set(map(type, value))
    if not kinds <= {bytes, str}:
        raise _refuse(key, f"elements of type {', '.join(sorted(k.__name__ for k in kinds))}", "an array of strings")
    items = [item.encode("utf-8", "surrogateescape") if isinstance(item, str) else item for item in value]
    return StringArray.of(items)


def _get_numbers(metadata: Metadata, key: str, n: int, kinds: str, expected: str) -> NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise _refuse(key, _kind(value), expected)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise _refuse(key, str(error), expected) from None
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise _refuse(key, _kind(array), expected)
    if len(array) != n:
        raise ModelFileError(f"{key} has {len(array)} entries for {n} tokens; both arrays must have the same length")
    return array


def _get_id(metadata: Metadata, key: str, n: int, default: int | None) -> int | None:
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < n else None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _refuse(key, _kind(value), "a token id")
    if not 0 <= value < n:
        raise ModelFileError(f"{key} is {value}, outside the vocabulary's ids 0 to {n - 1}")
    return int(value)


def _decode_all(tokens: StringArray) -> list[str]:
    # One decode of the joined tokens is several times faster than 262k small ones; a NUL inside a token spoils the
    # split, and so does invalid UTF-8: then each is decoded on its own, keeping invalid bytes as lone surrogates.
    try:
        texts = tokens.join(b"\0").decode("utf-8").split("\0")
        if len(texts) == len(tokens):
            return texts
    except UnicodeDecodeError:
        pass
    return [token.decode("utf-8", "surrogateescape") for token in tokens]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their types and scores, the ids with a role, and what to add around a text."""

    tokens: StringArray
    texts: list[str]  # tokens decoded; a token that is not UTF-8 holds lone surrogates
    ids: dict[str, int]  # text -> id, empty tokens left out
    types: NDArray[np.uint8]
    scores: NDArray[np.float64] | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool

    @classmethod
    def from_metadata(
        cls,
        metadata: Metadata,
        *,
        n_embd_rows: int | None,
        add_bos: bool,
        default_ids: tuple[int | None, int | None] = (None, None),
    ) -> Vocabulary:
        """Read and check the vocabulary; `default_ids` are bos and eos where the file does not say.

        Raises ModelFileError, naming the key, for a wrong element type, arrays whose lengths disagree, ids out of
        range, unknown token types, NaN scores, duplicate tokens, and more tokens than the embedding has rows.
        """
        tokens = get_strings(metadata, PREFIX + "tokens")
        n = len(tokens)
        if n == 0:
            raise ModelFileError(f"{PREFIX}tokens is empty")
        if n_embd_rows is not None and n > n_embd_rows:
            raise ModelFileError(
                f"{PREFIX}tokens has {n} tokens but the embedding has {n_embd_rows} rows; every token needs a row"
            )
        texts = _decode_all(tokens)
        ids = dict(zip(texts, range(n), strict=True))
        ids.pop("", None)
        if len(ids) != n - texts.count(""):
            _name_duplicate(texts)

        types = _read_types(metadata, n)
        scores = _get_numbers(metadata, PREFIX + "scores", n, "fiu", "an array of numbers")
        if scores is not None and np.isnan(scores).any():
            raise ModelFileError(f"{PREFIX}scores[{int(np.isnan(scores).argmax())}] is not a number")

        bos = _get_id(metadata, PREFIX + "bos_token_id", n, default_ids[0])
        eos = _get_id(metadata, PREFIX + "eos_token_id", n, default_ids[1])
        unk = _get_id(metadata, PREFIX + "unknown_token_id", n, None)
        ends = {eos, _get_id(metadata, PREFIX + "eot_token_id", n, None)}
        ends.add(_get_id(metadata, PREFIX + "eom_token_id", n, None))
        add_bos = get_flag(metadata, PREFIX + "add_bos_token", add_bos and bos is not None)
        add_eos = get_flag(metadata, PREFIX + "add_eos_token", False)
        for flag, name, id in ((add_bos, "bos", bos), (add_eos, "eos", eos)):
            if flag and id is None:
                raise ModelFileError(f"{PREFIX}add_{name}_token is true but {PREFIX}{name}_token_id is missing")
        return cls(
            tokens=tokens,
            texts=texts,
            ids=ids,
            types=types,
            scores=None if scores is None else scores.astype(np.float64),
            bos_id=bos,
            eos_id=eos,
            unk_id=unk,
            eog_ids=_find_turn_ends(ids, types, {id for id in ends if id is not None}),
            add_bos=add_bos,
            add_eos=add_eos,
        )


def _name_duplicate(texts: list[str]) -> None:
    first: dict[str, int] = {}
    for id, text in enumerate(texts):
        if text and first.setdefault(text, id) != id:
            raise ModelFileError(f"{PREFIX}tokens holds {text!r} twice, as ids {first[text]} and {id}")


def _read_types(metadata: Metadata, n: int) -> NDArray[np.uint8]:
    key = PREFIX + "token_type"
    types = _get_numbers(metadata, key, n, "iu", "an array of integers")
    if types is None:
        return np.full(n, TokenType.NORMAL, np.uint8)
    bad = (types < 0) | (types > max(TokenType))
    if bad.any():
        at = int(bad.argmax())
        raise ModelFileError(f"{key}[{at}] is {types[at]}; token types are 0 to {max(TokenType):d}")
    return types.astype(np.uint8)  # a copy: a turn end may have its type corrected


def _find_turn_ends(ids: dict[str, int], types: NDArray[np.uint8], named: set[int]) -> frozenset[int]:
    """The ids that end generation: those that the file names and those known by their text (as llama.cpp does)."""
    ends = set(named)
    for text in _TURN_ENDS:
        if (id := ids.get(text)) is not None:
            ends.add(id)
            types[id] = TokenType.CONTROL
    for text in _TURN_ENDS_IF_CONTROL:
        if (id := ids.get(text)) is not None and types[id] == TokenType.CONTROL:
            ends.add(id)
    # In the harmony format <|end|> closes one message of several; the turn goes on.
    if "<|return|>" in ids and "<|call|>" in ids and "<|end|>" in ids:
        ends.discard(ids["<|end|>"])
    return frozenset(ends)
