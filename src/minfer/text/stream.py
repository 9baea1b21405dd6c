"""Token ids to text while they arrive, one whole character at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes a stream of ids; the pieces joined equal `tokenizer.decode` of all ids.

    Bytes of an unfinished character wait for the next token; bytes that cannot be UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that became whole with this token, or "". Raises RequestError for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(id, special=self._special))

    def finish(self) -> str:
        """What an unfinished character leaves (U+FFFD or ""); the decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
