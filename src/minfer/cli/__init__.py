"""The command line. `main` is the entry point; everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
import warnings

EXIT_CODES = {
    0: "done",
    1: "an error that the message on standard error explains: a model, a file or a request that cannot be served",
    2: "the command line itself is wrong",
    130: "ended by Ctrl-C",
    141: "whoever read the output closed it (`minfer run ... | head -1`); nothing is printed",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with one of `EXIT_CODES`. A user's mistake never shows a traceback."""
    from minfer.cli.app import app
    from minfer.errors import MinferError

    _prepare_streams()
    code: object = 0
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            app(args=arguments, prog_name="minfer")
        except SystemExit as end:
            code = end.code
        except MinferError as error:
            from minfer.cli.terminal import complain

            complain(str(error))
            code = 1
        except KeyboardInterrupt:  # before a command began
            code = 130
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 141
    if code == 141:
        # What is still buffered would fail once more, and noisily, when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)


def _prepare_streams() -> None:
    """Closed streams become empty ones; a character that the terminal's encoding lacks is shown as `?`."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  for the whole process
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="replace")


def _show_warning(message: Warning | str, *where: object) -> None:
    from minfer.cli.terminal import note

    note(f"warning: {message}")
