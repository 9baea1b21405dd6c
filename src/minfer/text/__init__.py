"""Text to token ids and back, and chat messages to a prompt, from a GGUF file's metadata."""

from minfer.text.chat import ChatTemplate
from minfer.text.stream import StreamDecoder
from minfer.text.tokenizer import Tokenizer
from minfer.text.vocab import MissingPreTokenizerWarning

__all__ = ["ChatTemplate", "MissingPreTokenizerWarning", "StreamDecoder", "Tokenizer"]
