"""What others raise, told as this library's errors.

A context manager that is a generator would tie the error, from Python 3.12 on, to a cycle with all frames that it came
through, and their memory would stay mapped until the collector comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["telling"]

E = TypeVar("E", bound=BaseException)


class telling(contextlib.ContextDecorator, Generic[E]):  # noqa: N801  # as contextlib's own, it reads as a verb
    """Have a block, or a function, raise what ``meaning`` returns for one of these errors; None lets it be."""

    def __init__(self, kinds: type[E] | tuple[type[E], ...], meaning: Callable[[E], BaseException | None]) -> None:
        self._kinds = kinds
        self._meaning = meaning

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block, and tell its error if it is to be told."""
        if not isinstance(error, self._kinds):
            return
        told = self._meaning(error)
        try:
            if told is not None:
                raise told from None
        finally:
            del told, error  # a traceback has this frame
