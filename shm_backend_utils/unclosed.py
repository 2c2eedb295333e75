"""What nobody has closed says so when it is garbage, and where it was made."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .origin import Origin

__all__ = ["Unclosed"]


class Unclosed:
    """A part of what is to be closed: it issues a ResourceWarning if it is garbage before that, but in forked children.

    The warning is of the line of ``origin``; ``advice`` says how to close it; ``rest`` returns what more is to be said,
    or None if it was closed with something else.
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
