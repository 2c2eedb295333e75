"""Arguments, enumerations, functions of classes, and errors, as pybind11 makes them in the real stub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NoReturn

__all__ = [
    "ClassFunction",
    "ErrorCode",
    "NumberedEnum",
    "StubDiesError",
    "TritonError",
    "TritonModelException",
    "number",
    "refuse",
    "signed",
    "text",
    "texts",
    "truth",
    "unsigned",
]


def refuse(function: str, argument: str, value: object, expected: str) -> NoReturn:
    """Raise the stub's error for an argument of a wrong type."""
    raise TypeError(
        f"{function}(): incompatible function arguments: {argument} is {value!r} of type {type(value).__name__}; "
        f"expected {expected}"
    )


def text(function: str, argument: str, value: object) -> str:
    """Return a str; the argument may be a str, or UTF-8 in bytes."""
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            refuse(function, argument, value, "a str that UTF-8 can carry")
        return value
    if isinstance(value, str):
        return text(function, argument, str(value))
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    refuse(function, argument, value, "a str")


def unsigned(function: str, argument: str, value: object, bits: int) -> int:
    """Return a number of C++'s unsigned types."""
    if not hasattr(value, "__index__") or not 0 <= (found := value.__index__()) < 1 << bits:
        refuse(function, argument, value, f"an int of {bits} bits that is not negative")
    return int(found)


def signed(function: str, argument: str, value: object, bits: int) -> int:
    """Return a number of C++'s signed types."""
    most = 1 << (bits - 1)
    if not hasattr(value, "__index__") or not -most <= (found := value.__index__()) < most:
        refuse(function, argument, value, f"an int of {bits} bits")
    return int(found)


def texts(function: str, argument: str, value: object) -> list[str]:
    """Return the texts of a sequence."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        refuse(function, argument, value, "a sequence of str")
    return [text(function, argument, item) for item in value]


def truth(function: str, argument: str, value: object) -> bool:
    """Return the truth of a value, if pybind11 would accept it as a bool."""
    if value is None or not hasattr(value, "__bool__"):
        refuse(function, argument, value, "a bool")
    return bool(value)


def number(function: str, argument: str, value: object) -> float:
    """Return a number as C++'s double."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        refuse(function, argument, value, "a number")
    try:
        return float(value)  # type: ignore[arg-type]  # which has one of the two
    except OverflowError:
        refuse(function, argument, value, "a number of 64 bits")


class NumberedEnum(Enum):
    """Names for numbers; a member is equal to its number, and has its hash."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedEnum):
            return type(self) is type(other) and self.value == other.value
        return bool(self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"


class ClassFunction:
    """A function of a class, as pybind11 makes it: called on an object, it has one argument too many."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        found = partial(self._function, owner) if instance is None else partial(self._function, owner, instance)
        found.__doc__ = self.__doc__
        return found


class TritonModelException(Exception):  # noqa: N818  # Triton's name
    """A refusal of the Python backend."""


class StubDiesError(Exception):
    """A call that would kill a real stub, or its server, or read freed memory. A real stub never raises this."""


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


ErrorCode.__name__ = "__ErrorCode"  # a class statement would mangle it


class TritonError:
    """The error of a response, not an exception: a text for the client, and a code, from Triton 23.09 on."""

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
        """Return the text for the client."""
        return self._message

    def code(self) -> ErrorCode:
        """Return Triton's error code."""
        return self._code


setattr(TritonError, "__ErrorCode", ErrorCode)
