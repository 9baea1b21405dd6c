"""What goes wrong in this room: one base class, one class a stage. Nothing here depends on the rest of minfer."""

from __future__ import annotations


class MslError(Exception):
    """Base of every error of the translator and of the software Metal device."""


class SourceError(MslError):
    """The Metal source is not what Apple's compiler would accept, or uses what this translator cannot rewrite.

    `file` and `line` say where; `reason` says why, without the place.
    """

    def __init__(self, reason: str, file: str = "", line: int = 0) -> None:
        self.reason, self.file, self.line = reason, file, line
        super().__init__(f"{file}:{line}: {reason}" if file else reason)


class CompileError(MslError):
    """The C++ compiler refused the translated source; the message carries its words, with lines of the .metal file."""


class ToolError(MslError):
    """A compiler is missing or does not work; the message says what to install."""


class LaunchError(MslError):
    """A launch is outside what a Metal device accepts (sizes, bindings, limits), or a kernel did not run to its end."""
