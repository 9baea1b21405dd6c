"""SPM: SentencePiece BPE as Llama 2, Phi-3 and Gemma use it. The best-scored neighbours merge first, ties leftmost.

The rule is SentencePiece's `bpe_model.cc`, with llama.cpp's handling of the space prefix. A heap keeps it O(n log n).
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush

import numpy as np

from minfer.errors import ModelFileError, RequestError
from minfer.text.tokenizer import Tokenizer
from minfer.text.vocab import PREFIX, Metadata, TokenType, Vocabulary, get_flag, get_string

SPACE = "\u2581"  # SentencePiece's visible space
_CACHED_WORDS = 50_000
_CACHED_LENGTH = 48


class SpmTokenizer(Tokenizer):
    """Our own encoder: a 262k-piece vocabulary is ready in a fraction of a second and costs little memory."""

    def __init__(self, metadata: Metadata, n_embd_rows: int | None = None) -> None:
        """Raises ModelFileError as `Vocabulary.from_metadata`, and where scores are missing."""
        vocab = Vocabulary.from_metadata(metadata, n_embd_rows=n_embd_rows, add_bos=True, default_ids=(1, 2))
        super().__init__(vocab, name=get_string(metadata, "general.name") or "")
        if vocab.scores is None:
            raise ModelFileError(f"{PREFIX}scores is missing: an SPM tokenizer merges by score")
        self._add_space = get_flag(metadata, PREFIX + "add_space_prefix", True)
        reserved = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
        self._unk_id = vocab.unk_id
        if self._unk_id is None and vocab.types[0] in reserved:  # SentencePiece's place for it
            self._unk_id = 0
        self._costs: list[float] = (-vocab.scores).tolist()
        # Text never merges into a control, unknown or byte token: a user who types "<s>" does not make a BOS.
        self._pieces = dict(vocab.ids)
        for id in np.flatnonzero(np.isin(vocab.types, reserved)).tolist():
            if self._pieces.get(vocab.texts[id]) == id:
                del self._pieces[vocab.texts[id]]
        self._words = _word_pattern(vocab.texts)
        self._cache: dict[str, list[int]] = {}

    def _normal_bytes(self, id: int) -> bytes:
        return self._vocab.tokens[id].replace(b"\xe2\x96\x81", b" ")

    def _encode_text(self, text: str) -> list[int]:
        if self._add_space:
            text = " " + text
        ids: list[int] = []
        cache = self._cache
        for word in self._words.split(text.replace(" ", SPACE)):
            found = cache.get(word)
            if found is None:
                found = self._merge(word)
                if len(word) <= _CACHED_LENGTH:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = found
            ids += found
        return ids

    def _merge(self, text: str) -> list[int]:
        """Merge one word. A symbol is its start; `ends[start]` is where it ends, 0 once its left neighbour took it."""
        get, costs, n = self._pieces.get, self._costs, len(text)
        ends, before = list(range(1, n + 1)), list(range(-1, n - 1))
        heap = [(costs[id], i, i + 2) for i in range(n - 1) if (id := get(text[i : i + 2])) is not None]
        heapify(heap)
        while heap:
            _, left, end = heappop(heap)
            right = ends[left]
            if not 0 < right < n or ends[right] != end:
                continue  # one of the two has merged with another since
            ends[left], ends[right] = end, 0
            if end < n:
                before[end] = left
                if (id := get(text[left : ends[end]])) is not None:
                    heappush(heap, (costs[id], left, ends[end]))
            if (outer := before[left]) >= 0 and (id := get(text[outer:end])) is not None:
                heappush(heap, (costs[id], outer, end))
        ids: list[int] = []
        start = 0
        while start < n:
            symbol = text[start : ends[start]]
            id = get(symbol)
            ids += self._fall_back(symbol) if id is None else (id,)
            start = ends[start]
        return ids

    def _fall_back(self, char: str) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in char.encode("utf-8")]
        except KeyError:
            if self._unk_id is None:
                raise RequestError(f"the vocabulary has no token, no bytes and no unknown token for {char!r}") from None
            return [self._unk_id]


def _word_pattern(texts: list[str]) -> re.Pattern[str]:
    """Where a text may be cut before a space without changing its ids, so that words can be cached.

    A cut is safe where no piece spans it: after a character that no piece holds just before a space.
    """
    glued = {part[-1] for part in "\0".join(texts).split(SPACE)[:-1] if part} - {"\0"}
    kept = "".join(map(re.escape, sorted(glued | {SPACE})))
    return re.compile(f"(?<=[^{kept}])(?={SPACE})")
