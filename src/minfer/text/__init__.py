"""Text to token ids and back, and chat messages to a prompt, from a GGUF file's metadata."""

from minfer.text.stream import StreamDecoder
from minfer.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
