"""Sizes, ages, users and names that others have chosen, as a terminal may show them."""

from __future__ import annotations

import pwd
from collections.abc import Sequence
from typing import Final

__all__ = ["OWNER", "age", "first_of", "printable", "size", "user"]

OWNER: Final = {True: "alive", False: "dead", None: "unknown"}
"""How it is with the owner of memory."""


def printable(text: str) -> str:
    """Return what somebody has called a file, a program or a model, without what a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def first_of(names: Sequence[object], most: int = 1) -> str:
    """Return the first of some names, with commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def user(uid: int) -> str:
    """Return a user's name; his id if he has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def size(byte_size: float) -> str:
    """Return a number of bytes in the unit that makes it short."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while byte_size >= 1024 and len(units) > 1:
        byte_size /= 1024
        units.pop(0)
    return f"{byte_size:.0f} {units[0]}"


def age(seconds: float) -> str:
    """Return how long ago something was, in the unit that makes it short."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
