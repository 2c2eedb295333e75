"""Arguments as the real stub takes them: by C++ types, with a TypeError for all that is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

__all__ = ["number", "refuse", "signed", "text", "texts", "truth", "unsigned"]


def refuse(function: str, argument: str, value: object, expected: str) -> NoReturn:
    """Raise what the stub raises for an argument of a wrong type."""
    raise TypeError(
        f"{function}(): incompatible function arguments: {argument} is {value!r} of type {type(value).__name__}; "
        f"expected {expected}"
    )


def text(function: str, argument: str, value: object) -> str:
    """Return a text, which may come as UTF-8."""
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
    """Return a bool, or what tells whether it is true, as pybind11 asks it."""
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
