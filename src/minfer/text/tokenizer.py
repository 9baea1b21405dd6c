"""What every tokenizer shares: special tokens first, then the model's own rule, and ids back to bytes."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.errors import ModelFileError, RequestError, UnsupportedError
from minfer.text.vocab import PREFIX, Metadata, TokenType, Vocabulary, get_string

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_C_SPACES = " \t\n\v\f\r"


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: hundreds of thousands of new objects, none of them in a cycle, would set off many."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Tokenizer(ABC):
    """Text to token ids and back, as the model's file says. Make one with `from_metadata`; it is safe to share."""

    def __init__(self, vocab: Vocabulary, *, name: str = "") -> None:
        self._vocab = vocab
        self.n_vocab = len(vocab.tokens)
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eog_ids = vocab.eog_ids
        self._types = vocab.types.tolist()
        self._byte_ids: dict[int, int] = {}
        for id in np.flatnonzero(vocab.types == TokenType.BYTE).tolist():
            match = _BYTE_TOKEN.fullmatch(vocab.tokens[id])
            if not match:
                raise ModelFileError(
                    f"{PREFIX}tokens[{id}] is typed as a byte but is {vocab.tokens[id]!r}, not <0x00> to <0xFF>"
                )
            self._byte_ids[int(match[1], 16)] = id
        self._bytes_of = {id: bytes([byte]) for byte, id in self._byte_ids.items()}
        self._special = _SpecialTokens(vocab, name, with_control=True)
        self._user_defined = _SpecialTokens(vocab, name, with_control=False)

    @classmethod
    def from_metadata(cls, metadata: Metadata, n_embd_rows: int | None = None) -> Tokenizer:
        """The tokenizer that `tokenizer.ggml.model` names; `n_embd_rows` is the row count of the embedding, if known.

        Fewer tokens than rows is accepted (padded rows); more is refused.
        Raises ModelFileError for damaged or contradictory metadata and UnsupportedError for a model or pre-tokenizer
        that minfer does not know. Warns (MissingPreTokenizerWarning) where a byte-level BPE names no pre-tokenizer.
        """
        model = get_string(metadata, PREFIX + "model")
        if model is None:
            raise ModelFileError(f"{PREFIX}model is missing: the file has no tokenizer")
        with no_collection():
            if model == "gpt2":
                from minfer.text.bpe import BpeTokenizer

                return BpeTokenizer(metadata, n_embd_rows)
            if model == "llama":
                from minfer.text.spm import SpmTokenizer

                return SpmTokenizer(metadata, n_embd_rows)
        raise UnsupportedError(f"{PREFIX}model is {model!r}; minfer reads 'gpt2' (byte-level BPE) and 'llama' (SPM)")

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Encode a run of text free of special tokens; one stood before it, or nothing."""

    @abstractmethod
    def _normal_bytes(self, id: int) -> bytes:
        """The bytes of a normal token."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS where the file asks for them. `parse_special` reads control tokens such as
        `<|im_start|>` written in the text as what they are; leave it off for text from someone you do not trust.
        Where special tokens overlap, the leftmost and then the longest wins, as in Hugging Face tokenizers.
        A lone surrogate becomes U+FFFD. Raises RequestError if `text` is not a str.
        """
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a str, found {type(text).__name__}")
        text = _SURROGATE.sub("\ufffd", text)
        ids: list[int] = []
        if add_special and self._vocab.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        for part in (self._special if parse_special else self._user_defined).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_text(part)
        if add_special and self._vocab.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:
        """What the token adds to the output: b"" for control and unknown tokens unless `special`, and for unused ones.

        Raises RequestError for an id outside the vocabulary.
        """
        self._check(id)
        kind = self._types[id]
        if kind == TokenType.NORMAL:
            return self._normal_bytes(id)
        if kind == TokenType.BYTE:
            return self._bytes_of[id]
        if kind == TokenType.USER_DEFINED or (special and kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
            return self._vocab.tokens[id]
        return b""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        SPM models that prefix a space keep it: decoding is the plain sum of `token_bytes`, so it equals a stream.
        """
        return b"".join([self.token_bytes(id, special=special) for id in ids]).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        """Whether the token is control or unknown, so that it gives no output. Raises RequestError as `token_bytes`."""
        self._check(id)
        return self._types[id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def piece(self, id: int) -> bytes:
        """The token as the file spells it. Raises RequestError for an id outside the vocabulary."""
        self._check(id)
        return self._vocab.tokens[id]

    def special_id(self, text: str) -> int | None:
        """The id of the control or user-defined token spelled `text`, or None."""
        id = self._vocab.ids.get(text)
        return id if id is not None and self._types[id] in (TokenType.CONTROL, TokenType.USER_DEFINED) else None

    def _check(self, id: int) -> None:
        if not 0 <= id < self.n_vocab:
            raise RequestError(f"token id {id} is outside the vocabulary's ids 0 to {self.n_vocab - 1}")


class _SpecialTokens:
    """Cuts special tokens out of a text, in time linear in the text.

    Gemma has 6,000 of them and every newline starts one, so they sit in a character trie: a walk from a first character
    ends at the first mismatch. The trie is built at the first use.
    """

    def __init__(self, vocab: Vocabulary, model_name: str, *, with_control: bool) -> None:
        kinds = [TokenType.USER_DEFINED] + [TokenType.CONTROL, TokenType.UNKNOWN] * with_control
        self._ids = np.flatnonzero(np.isin(vocab.types, kinds)).tolist()
        self._texts = vocab.texts
        # Phi-3's published tokenizer swallows white space after these; GGUF has no key for it, the name tells.
        name = model_name.lower()
        keeps_space = ("<unk>", "<s>", "<|endoftext|>")
        self._strips = (
            {id for id in self._ids if vocab.texts[id] not in keeps_space}
            if "phi-3" in name or "phi3" in name
            else set()
        )
        self._built: tuple[dict[str, Any], re.Pattern[str]] | None = None

    def _build(self) -> tuple[dict[str, Any], re.Pattern[str]]:
        if self._built is None:
            root: dict[str, Any] = {}
            for id in self._ids:
                node = root
                for char in self._texts[id]:
                    node = node.setdefault(char, {})
                node[""] = id
            root.pop("", None)
            first = "[" + "".join(map(re.escape, root)) + "]" if root else r"(?!)"
            self._built = root, re.compile(first)
        return self._built

    def split(self, text: str) -> Iterator[str | int]:
        """Runs of plain text and ids of special tokens, in order."""
        root, first = self._build()
        start = at = 0
        while match := first.search(text, at):
            begin = match.start()
            node, end, id = root, begin, -1
            for i in range(begin, len(text)):
                node = node.get(text[i])  # type: ignore[assignment]
                if node is None:
                    break
                if "" in node:
                    end, id = i + 1, node[""]
            if id < 0:
                at = begin + 1
                continue
            if begin > start:
                yield text[start:begin]
            yield id
            if id in self._strips:
                while end < len(text) and text[end] in _C_SPACES:
                    end += 1
            start = at = end
        if start < len(text):
            yield text[start:]
