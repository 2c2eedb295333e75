"""Checks of decoded JSON values that a peer sent: what is wrong is named, what may be a secret is not shown."""

from __future__ import annotations

from typing import Any, Final

from ..errors import DescriptorError

__all__ = ["MAX_INT64", "brief", "check_fields", "integer", "kind_of", "shown_number"]

MAX_INT64: Final = 2**63 - 1


def check_fields(field: str, value: dict[str, Any], expected: frozenset[str]) -> None:
    """Raise DescriptorError unless an object has exactly these members."""
    if value.keys() != expected:
        inside = f"{field}." if field else ""
        for name in sorted(expected - value.keys()):
            raise DescriptorError(f"{inside}{name}", "nothing", "this field")
        for name in sorted(value.keys() - expected):
            raise DescriptorError(f"{inside}{brief(name)}", "an unknown field", f"only {', '.join(sorted(expected))}")


def integer(field: str, name: str, value: object, least: int, most: int = MAX_INT64) -> int:
    """Return an integer of a range, or raise DescriptorError; ``name`` is a member's, or ``[index]``."""
    if type(value) is int and least <= value <= most:
        return value
    place = f"{field}{name}" if name.startswith("[") else f"{field}.{name}"
    limit = f"an integer from {least} to {most}" if most < MAX_INT64 else f"a 64-bit integer of {least} or more"
    raise DescriptorError(place, shown_number(value), limit)


def kind_of(value: object) -> str:
    """Name a JSON value's type without showing the value, which may be a secret."""
    if value is None:
        return "null or nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "another string" if value else "an empty string"
    return "another array" if isinstance(value, list) else "an object"


def shown_number(value: object) -> str:
    """Return a number as text, or what else the value is."""
    return brief(str(value)) if type(value) is int and value.bit_length() < 256 else kind_of(value)


def brief(text: str) -> str:
    """Return text that can be printed, cut where it is long."""
    printable = text.encode(errors="backslashreplace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    return printable if len(printable) <= 64 else f"{printable[:61]}..."
