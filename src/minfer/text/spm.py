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
        vocab = Vocabulary.from_metadata(metadata, n_embd_rows=n_embd_rows, add_bos=True, default_ids=(1, 2, 0))
        super().__init__(vocab, name=get_string(metadata, "general.name") or "")
        if vocab.scores is None:
            raise ModelFileError(f"{PREFIX}scores is missing: an SPM tokenizer merges by score")
        self._add_space = get_flag(metadata, PREFIX + "add_space_prefix", True)
        self._scores: list[float] = vocab.scores.tolist()
        # Text never merges into a control, unknown or byte token: a user who types "<s>" does not make a BOS.
        self._pieces = dict(vocab.ids)
        reserved = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
        for id in np.flatnonzero(np.isin(vocab.types, reserved)).tolist():
            if self._pieces.get(vocab.texts[id]) == id:
                del self._pieces[vocab.texts[id]]
        self._words = _word_pattern(vocab.texts)
        self._cache: dict[str, list[int]] = {}
        self.n_steps = 0  # heap pops so far: what the tests bound

    def _normal_bytes(self, id: int) -> bytes:
        return self._vocab.tokens[id].replace(b"\xe2\x96\x81", b" ")

    def _encode_text(self, text: str, *, after_special: bool) -> list[int]:
        if self._add_space and after_special:
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
        """Merge one word. `symbols[i]` is the symbol that starts at character i, "" once its left neighbour took it."""
        pieces, scores, n = self._pieces, self._scores, len(text)
        symbols = list(text)
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        heap = []
        for i in range(n - 1):
            id = pieces.get(text[i : i + 2])
            if id is not None:
                heap.append((-scores[id], i, 2))
        heapify(heap)
        while heap:
            self.n_steps += 1
            _, left, size = heappop(heap)
            right = after[left]
            if not symbols[left] or right == n or len(symbols[left]) + len(symbols[right]) != size:
                continue  # one of the two has merged with another since
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = right = after[right]
            if right < n:
                before[right] = left
                pair = symbols[left] + symbols[right]
                if (id := pieces.get(pair)) is not None:
                    heappush(heap, (-scores[id], left, len(pair)))
            if (outer := before[left]) >= 0:
                pair = symbols[outer] + symbols[left]
                if (id := pieces.get(pair)) is not None:
                    heappush(heap, (-scores[id], outer, len(pair)))
        ids: list[int] = []
        for symbol in symbols:
            if symbol:
                id = pieces.get(symbol)
                ids += self._fall_back(symbol) if id is None else (id,)
        return ids

    def _fall_back(self, char: str) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in char.encode("utf-8")]
        except KeyError:
            if self._vocab.unk_id is None:
                raise RequestError(
                    f"the vocabulary has no token for {char!r}, and neither byte tokens nor an unknown token"
                ) from None
            return [self._vocab.unk_id]


def _word_pattern(texts: list[str]) -> re.Pattern[str]:
    """Where a text may be cut before a space without changing its ids, so that words can be cached.

    A cut is safe where no piece spans it: after a character that no piece holds just before a space.
    """
    glued = {part[-1] for part in "\0".join(texts).split(SPACE)[:-1] if part} - {"\0"}
    kept = "".join(map(re.escape, sorted(glued | {SPACE})))
    return re.compile(f"(?<=[^{kept}])(?={SPACE})")
