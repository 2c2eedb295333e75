"""What others raise, told as this library's errors.

Where memory is in hand, no generator does it, and no ``ExitStack``. An error that a function of
``contextlib.contextmanager`` raises for another one, or takes, lies in a cycle from Python 3.12 on, with all frames
that it came through. Memory of a client's that these had would stay mapped until the collector comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["telling"]

E = TypeVar("E", bound=BaseException)


class telling(contextlib.ContextDecorator, Generic[E]):  # noqa: N801  # as contextlib's own, it reads as a verb
    """Have a block, or a function, raise what these errors mean.

    ``meaning`` returns, for one, the error to raise instead; None to let it be.
    """

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
