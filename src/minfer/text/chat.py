"""Chat messages to a prompt, by the template that the model's file carries, as Hugging Face's transformers does it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from minfer.errors import ModelFileError, RequestError, TemplateError
from minfer.text.sandbox import MAX_BITS, MAX_DEPTH, TemplateEnvironment, budget, weigh
from minfer.text.vocab import Metadata, get_string

if TYPE_CHECKING:
    from types import TracebackType

    from minfer.text.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"
MAX_SOURCE = 256 * 1024  # characters; published templates have at most a few ten thousand

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_environment: TemplateEnvironment | None = None
_lock = threading.Lock()


def _shared_environment() -> TemplateEnvironment:
    global _environment
    with _lock:
        if _environment is None:
            _environment = TemplateEnvironment()
        return _environment


class ChatTemplate:
    """A compiled chat template. A template from anyone is safe to render: `minfer.text.sandbox` has the limits."""

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, tool_use_source: str | None = None
    ) -> None:
        """Compile `source`, and `tool_use_source` (used when tools are given) if there is one.

        Raises TemplateError, naming the line, for a template that does not compile.
        """
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = _compile(source)
        self._tool_use = self._template if tool_use_source is None else _compile(tool_use_source)

    @classmethod
    def from_metadata(cls, metadata: Metadata, tokenizer: Tokenizer) -> ChatTemplate:
        """The file's template: `tokenizer.chat_template`, and `tokenizer.chat_template.tool_use` for calls with tools.

        Without one, ChatML where its tokens exist. Raises TemplateError if there is no template to use or it does not
        compile, ModelFileError if the metadata is not a string.
        """
        source, tool_use = get_string(metadata, KEY), get_string(metadata, f"{KEY}.tool_use")
        if source is None:
            source = get_string(metadata, f"{KEY}.default") or tool_use
        if source is None:
            if None in (tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")):
                named = [key for key in metadata if key.startswith(KEY + ".")]
                also = f" (it has {', '.join(named)}, which no call selects)" if named else ""
                raise TemplateError(
                    f"the model has no chat template ({KEY} is missing{also}) and no ChatML tokens; "
                    "it may be a base model: use --raw to complete plain text"
                )
            source = _CHATML
        bos, eos = (None if id is None else _spell(tokenizer, id) for id in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos_token=bos, eos_token=eos, tool_use_source=tool_use)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `variables` (such as `enable_thinking`) are offered to the template as they are.

        The template writes BOS itself where the model wants one: encode the result with `add_special=False`.
        A message's keys whose value is None are left out, as transformers does.
        Raises RequestError for arguments that are not plain data, TemplateError (with the template's line and the
        variables on offer) if the template fails, refuses the messages, goes over its limits or leaves the sandbox.
        """
        if isinstance(messages, str | bytes) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError("messages must be a list of mappings such as {'role': 'user', 'content': '...'}")
        context: dict[str, Any] = {
            **{name: token for name, token in self._tokens.items() if token is not None},
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": [
                {key: value for key, value in _plain(message, f"messages[{i}]").items() if value is not None}
                for i, message in enumerate(messages)
            ],
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_use if tools is not None else self._template
        with budget(weigh(context, 1 << 62)[0]):
            try:
                return template.render(context)
            except RecursionError:
                raise _error("the template recurses too deeply", None, context) from None
            except MemoryError:
                raise _error("the template ran out of memory", None, context) from None
            except Exception as error:  # whatever a hostile template can provoke
                raise _error(str(error) or type(error).__name__, _line_of(error.__traceback__), context) from error


def _compile(source: str) -> jinja2.Template:
    if not isinstance(source, str):
        raise TemplateError(f"the chat template must be text, found {type(source).__name__}")
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are accepted")
    with budget():
        try:
            return _shared_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError):
            raise TemplateError("the chat template is nested too deeply to compile") from None
        except Exception as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error


def _error(reason: str, line: int | None, context: Mapping[str, Any]) -> TemplateError:
    where = f"chat template, line {line}" if line else "chat template"
    return TemplateError(f"{where}: {reason}; variables on offer: {', '.join(sorted(context))}")


def _line_of(traceback: TracebackType | None) -> int | None:
    """The deepest template line: jinja rewrites its frames to carry the template's own line numbers."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _spell(tokenizer: Tokenizer, id: int) -> str:
    try:
        return tokenizer.piece(id).decode("utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(f"token {id}, the BOS or EOS, is not UTF-8 text") from None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of exact JSON types, so that no method of a caller's object is within a template's reach.

    Raises RequestError for anything else.
    """
    if value is None or type(value) in (str, bool, float):
        return value
    if depth > MAX_DEPTH // 2:
        raise RequestError(f"{where} is nested deeper than {MAX_DEPTH // 2}")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and int(value).bit_length() <= MAX_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where} is a {type(value).__name__}; a chat template takes text, numbers, lists and mappings")
