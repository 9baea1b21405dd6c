"""`minfer chat`: a conversation at the terminal, or over a pipe, one line a message."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer.cli.generate import make_sampling, report, stream
from minfer.cli.terminal import coloured, complain, note, safe, write
from minfer.errors import ContextOverflowError, MinferError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from minfer import Generation, Model

HELP = """\
/help            this list
/clear           forget the conversation, keep the system message
/regen           another answer to the last message
/system [TEXT]   set the system message; without TEXT, show it
/save FILE       write the conversation to a file (JSON)
/load FILE       go on with a conversation from a file
/quit            leave; so does Ctrl-D
\"\"\"              begins and ends a message of several lines; a line that ends in \\ goes on in the next
//...            a message that begins with /
Ctrl-C           stop the answer"""

_SAVED_LIMIT = 64 << 20  # bytes
_ROLES = ("system", "user", "assistant")


class Chat:
    """The loop of one conversation."""

    def __init__(
        self,
        model: Model,
        system: str | None,
        *,
        n_predict: int | None,
        sampling: Mapping[str, Any],
        stop: Sequence[str],
        stats: bool,
    ) -> None:
        _ = model.template  # a model that cannot chat says so now, not after the first message
        self._model = model
        self._session = model.session(system)
        self._how: dict[str, Any] = {"n_predict": n_predict, "sampling": make_sampling(sampling), "stop": stop}
        self._stats = stats
        self._files: set[Path] = set()  # written or read in this run: /save may replace them
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: note(HELP),
            "/clear": lambda rest: self._clear(),
            "/regen": lambda rest: self._answer(lambda: self._session.regenerate(**self._how)),
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Until /quit or the end of the input. An error is said and the conversation goes on."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            note("Ctrl-C stops an answer, /help lists commands, /quit or Ctrl-D leaves.")
        while (text := self._read()) is not None:
            command, _, rest = text.partition(" ")
            try:
                if command in ("/quit", "/exit", "/bye"):
                    return
                if command in self._commands:
                    self._commands[command](rest.strip())
                elif text.startswith("/") and not text.startswith("//"):
                    complain(f"no command {command}; /help lists them, // begins a message with a slash")
                elif text.strip():
                    message = text.removeprefix("/") if text.startswith("//") else text
                    self._answer(lambda message=message: self._session.send(message, **self._how))  # type: ignore[misc]
            except ContextOverflowError as error:
                complain(f"{error}. /clear begins anew; --n-ctx sets the size of the context")
            except MinferError as error:
                complain(str(error))

    # ---- input ----

    def _read(self) -> str | None:
        """A message or command; None at the end of the input."""
        try:
            line = self._line("> ")
            if line.startswith('"""'):
                return self._block(line[3:])
            while line.endswith("\\"):
                line = line[:-1] + "\n" + self._line("... ")
            return line
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            note("\n/quit or Ctrl-D leaves.")
            return ""

    def _block(self, first: str) -> str:
        lines = []
        line = first
        while not line.endswith('"""'):
            lines.append(line)
            line = self._line("... ")
        lines.append(line.removesuffix('"""'))
        # A quote mark on a line of its own adds no empty line.
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    @staticmethod
    def _line(prompt: str) -> str:
        """A line, without its end. Raises `EOFError`, and `RequestError` for what is not UTF-8."""
        if not sys.stdin.isatty():
            raw = sys.stdin.buffer.readline(_SAVED_LIMIT)
            if not raw:
                raise EOFError
            return raw.decode("utf-8", "replace").rstrip("\r\n")
        if coloured(sys.stdout):
            prompt = f"\001\x1b[1;36m\002{prompt}\001\x1b[0m\002"  # \001 and \002: readline must not count these
        return input(prompt)

    # ---- commands ----

    def _answer(self, start: Callable[[], Generation]) -> None:
        with _stoppable() as stopped:
            generation = start()
            try:
                stream(generation, stopped)
            except KeyboardInterrupt:  # the second Ctrl-C: in the middle of a long prompt, say
                pass
            finally:
                generation.close()
                if generation.text and not generation.text.endswith("\n"):
                    write("\n")
        if generation.finish_reason is None:
            note("(stopped)")
        report(generation, self._model.n_ctx, stats=self._stats)

    def _clear(self) -> None:
        self._session.clear()
        note("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        messages = self._session.messages
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        if not text:
            note(f"System message: {first['content']}" if first else "There is no system message.")
            return
        if first is not None:
            messages.pop(0)
        messages.insert(0, {"role": "system", "content": text})
        note("The system message is set; it holds for the whole conversation.")

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        if path.exists() and path not in self._files:
            raise RequestError(f"{path} exists already; name another file")
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.write_text(
                json.dumps({"messages": self._session.messages}, indent=1, ensure_ascii=False), "utf-8"
            )
            os.replace(temporary, path)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        self._files.add(path)
        note(f"Saved {len(self._session.messages)} messages to {path}.")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        messages = read_messages(path)
        self._session.messages = messages
        self._files.add(path)
        for message in messages:
            if message["role"] != "system":
                mark = "> " if message["role"] == "user" else ""
                note(f"{mark}{message['content']}")
        note(f"Loaded {len(messages)} messages from {path}.")


def read_messages(path: Path) -> list[dict[str, Any]]:
    """A conversation as /save wrote it. Raises `RequestError` that says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            data = file.read(_SAVED_LIMIT + 1)
        content = json.loads(data) if len(data) <= _SAVED_LIMIT else None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise RequestError(f'{path} is not a saved conversation: expected an object with a list "messages"')
    for number, message in enumerate(messages):
        good = isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
        if not good:
            raise RequestError(
                f'{path}: message {number} is not understood: expected "role" (one of {", ".join(_ROLES)}) and '
                f'a text as "content", found {safe(repr(message)):.80}'
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _path(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"{command} needs a file name")
    return Path(os.path.expanduser(name)).absolute()


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for an end between two pieces, so that the step in progress leaves the KV cache whole; a second
    Ctrl-C interrupts where it is."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
