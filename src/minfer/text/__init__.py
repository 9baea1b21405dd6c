"""Text to token ids and back, and chat messages to a prompt, from a GGUF file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.text.stream import StreamDecoder
from minfer.text.tokenizer import Tokenizer
from minfer.text.vocab import MissingPreTokenizerWarning

if TYPE_CHECKING:
    from minfer.text.chat import ChatTemplate

__all__ = ["ChatTemplate", "MissingPreTokenizerWarning", "StreamDecoder", "Tokenizer"]


def __getattr__(name: str) -> object:
    # The template engine loads on first use: text generation does without it.
    if name == "ChatTemplate":
        from minfer.text.chat import ChatTemplate

        return ChatTemplate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
