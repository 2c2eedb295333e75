"""Errors of others, translated to this library's.

A context manager that is a generator would tie the error, from Python 3.12 on, to a cycle with all frames that it came
through, and their memory would stay mapped until the collector comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["translate"]

E = TypeVar("E", bound=BaseException)


class translate(contextlib.ContextDecorator, Generic[E]):  # noqa: N801  # as contextlib's own, it reads as a verb
    """Make a block, or a function, raise the result of ``meaning`` for one of these errors; None keeps the error."""

    def __init__(self, kinds: type[E] | tuple[type[E], ...], meaning: Callable[[E], BaseException | None]) -> None:
        self._kinds = kinds
        self._meaning = meaning

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block, and raise the translation of its error if it has one."""
        if not isinstance(error, self._kinds):
            return
        translated = self._meaning(error)
        try:
            if translated is not None:
                raise translated from None
        finally:
            del translated, error  # a traceback has this frame
