"""What a model answers with, or is told, when something fails."""

from __future__ import annotations

from typing import Final

from .arguments import refuse, text
from .enums import NumberedEnum

__all__ = ["ErrorCode", "StubDiesError", "TritonError", "TritonModelException"]


class TritonModelException(Exception):  # noqa: N818  # Triton's name
    """What the Python backend refuses."""


class StubDiesError(Exception):
    """What kills a real stub, or even its server, or has it read memory that is gone. No real stub raises it."""


class ErrorCode(NumberedEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


ErrorCode.__name__ = "__ErrorCode"  # which no class statement can say


class TritonError:
    """The error of a response: what the client is told, and a code, INTERNAL by default, from Triton 23.09 on.

    It is no exception: ``raise`` needs :class:`TritonModelException`.
    """

    __slots__ = ("__weakref__", "_code", "_message")

    UNKNOWN: Final = ErrorCode.UNKNOWN
    INTERNAL: Final = ErrorCode.INTERNAL
    NOT_FOUND: Final = ErrorCode.NOT_FOUND
    INVALID_ARG: Final = ErrorCode.INVALID_ARG
    UNAVAILABLE: Final = ErrorCode.UNAVAILABLE
    UNSUPPORTED: Final = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: Final = ErrorCode.ALREADY_EXISTS
    CANCELLED: Final = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = text("TritonError", "message", message)
        if not isinstance(code, ErrorCode):
            refuse("TritonError", "code", code, "one of TritonError's codes")
        self._code = code

    def message(self) -> str:
        """Return what the client is told."""
        return self._message

    def code(self) -> ErrorCode:
        """Return Triton's error code."""
        return self._code


setattr(TritonError, "__ErrorCode", ErrorCode)
