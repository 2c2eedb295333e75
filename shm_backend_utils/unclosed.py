"""Warnings for objects that are garbage without having been closed, with the line that made them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .origin import Origin

__all__ = ["Unclosed"]


class Unclosed:
    """A part of a closable object: issues a ResourceWarning if the object is garbage unclosed; not in forked children.

    The warning names the line of ``origin``; ``advice`` says how to close the object; ``rest`` returns the end of the
    message, or None if the object was closed with another one.
    """

    __slots__ = ("_advice", "_is_closed", "_origin", "_process", "_rest")

    def __init__(self, origin: Origin, advice: str, rest: Callable[[], str | None] = str) -> None:
        self._origin = origin
        self._advice = advice
        self._rest = rest
        self._is_closed = False
        self._process = os.getpid()

    def close(self) -> None:
        """Say nothing. Twice is fine."""
        self._is_closed = True

    # When the interpreter ends, this module's names may be gone before the last object is.
    def __del__(self, getpid: Any = os.getpid, warn: Any = warnings.warn_explicit, modules: Any = sys.modules) -> None:
        if self._is_closed or getpid() != self._process or not modules:
            return
        rest = self._rest()
        if rest is not None:
            origin = self._origin
            text = f"{origin} was not closed{rest}; {self._advice}"
            warn(text, ResourceWarning, origin.code.co_filename, origin.line)
