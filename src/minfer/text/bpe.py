"""Byte-level BPE (GPT-2 and its heirs) on Hugging Face's `tokenizers`, built in memory from the file's arrays."""

from __future__ import annotations

import re
import warnings
from functools import cached_property
from typing import TYPE_CHECKING

from minfer.errors import ModelFileError, UnsupportedError
from minfer.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from minfer.text.tokenizer import Tokenizer, no_collection
from minfer.text.vocab import PREFIX, Metadata, MissingPreTokenizerWarning, Vocabulary, get_string, get_strings

if TYPE_CHECKING:
    from collections.abc import Mapping

    import tokenizers
    from tokenizers import pre_tokenizers

    from minfer.gguf import StringArray


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (OpenAI `encoder.py`): a byte that prints stands for itself."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_MERGES = PREFIX + "merges"
_SURROGATE = re.compile("[\udc80-\udcff]")
_PAIRS = re.compile(rb"[^ \n]++ [^ \n]++(?:\n[^ \n]++ [^ \n]++)*+")  # lines of two words


class BpeTokenizer(Tokenizer):
    """Merges by the file's list, within the words that its pre-tokenizer cuts.

    A byte that the vocabulary has no token for is left out (SmolLM2 lacks some control characters), as llama.cpp and
    Hugging Face's tokenizers do: the model never saw it.
    """

    def __init__(self, metadata: Metadata, n_embd_rows: int | None = None) -> None:
        """Raises ModelFileError as `Vocabulary.from_metadata` and for missing merges; UnsupportedError for an unknown
        pre-tokenizer. What the merges say is checked when they are first needed."""
        self._pre = _find_pre_tokenizer(metadata)
        vocab = Vocabulary.from_metadata(metadata, n_embd_rows=n_embd_rows, add_bos=self._pre.add_bos)
        super().__init__(vocab, name=get_string(metadata, "general.name") or "")
        self._merges = get_strings(metadata, _MERGES)

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        """Made for the first text: ids need no encoder, and it takes longer than all else in opening a small model."""
        with no_collection():
            return _build_encoder(self._vocab, _read_merges(self._merges), self._pre)

    def _normal_bytes(self, id: int) -> bytes:
        try:
            return bytes([_BYTE_OF[char] for char in self._vocab.texts[id]])
        except KeyError:  # not in the byte alphabet: the token stands for its own spelling
            return self._vocab.tokens[id]

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


def _find_pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    key = PREFIX + "pre"
    name = get_string(metadata, key)
    if name is None:
        warnings.warn(
            f"{key} is missing: 'default' is assumed, and text may be cut into the wrong tokens; "
            "convert the model again",
            MissingPreTokenizerWarning,
            stacklevel=4,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(f"{key} is {name!r}; minfer knows {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _read_merges(lines: StringArray) -> list[tuple[str, str]]:
    """The merges as pairs. Raises ModelFileError, naming the first that is not two words."""
    joined = lines.join(b"\n")
    if joined.count(b"\n") == len(lines) - 1 and _PAIRS.fullmatch(joined):  # one look at all of them
        joined = joined.replace(b"\n", b" ")
    else:
        for i, line in enumerate(lines):
            if line.count(b" ") != 1 or line[:1] == b" " or line[-1:] == b" ":
                raise ModelFileError(f"{_MERGES}[{i}] is {line!r}; a merge is two tokens with one space between them")
        joined = lines.join(b" ")
    try:
        halves = joined.decode("utf-8").split(" ") if lines else []
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{_MERGES} is not UTF-8: {error}") from None
    return list(zip(halves[::2], halves[1::2], strict=True))


def _name_unknown(merges: list[tuple[str, str]], ids: Mapping[str, int]) -> None:
    for i, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in ids:
                raise ModelFileError(f"{_MERGES}[{i}] is {f'{left} {right}'!r}, but {part!r} is not a token")


def _build_encoder(vocab: Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizer) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import models

    ids = vocab.ids
    if _SURROGATE.search("".join(vocab.texts)):
        # Text cannot give a token that is not UTF-8, and the library takes none.
        ids = {text: id for text, id in ids.items() if not _SURROGATE.search(text)}
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        _name_unknown(merges, ids)
        raise ModelFileError(f"{_MERGES}: {error}") from error
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = build_pre_tokenizer(pre)
    return encoder


def build_pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The library's form of a pre-tokenizer: cut by each pattern in turn, then spell bytes in GPT-2's alphabet."""
    import tokenizers
    from tokenizers import pre_tokenizers

    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
