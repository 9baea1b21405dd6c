"""The error tree. A message says what, where, what was found, what was expected and what to do."""

from __future__ import annotations


class MinferError(Exception):
    """Base of every error that minfer raises on purpose; the command line prints it without a traceback."""


class ModelFileError(MinferError):
    """A model file is damaged, hostile, or not of a kind minfer reads."""


class UnsupportedError(MinferError):
    """A valid model or request needs something that minfer, or the chosen device, does not have."""


class SourceError(MinferError):
    """A model could not be found or fetched."""


class TemplateError(MinferError):
    """A chat template cannot be compiled or rendered."""


class ContextOverflowError(MinferError):
    """A request needs more KV cells than the context has."""


class NumericsError(MinferError):
    """A forward pass produced NaN or Inf."""


class RequestError(MinferError, ValueError):
    """An argument of the caller is outside what the call accepts."""


class GraphError(MinferError):
    """A graph breaks a rule of its ops: an arity, a shape or a type. Names the node."""


class DeviceMemoryError(MinferError):
    """A device has less memory than the request needs; the text has both numbers."""


class DeviceError(MinferError):
    """A device stopped: a fault, a wait without end, or a finding of its checks. It is dead until it is made anew."""
