"""What others raise, told as this library's errors.

No generator does it: an error that a function of ``contextlib.contextmanager`` raises for another one lies, from Python
3.12 on, in a cycle with that one and all frames that it came through. What they had in hand, memory of a client's among
it, would stay mapped until the collector comes.
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

    Parameters
    ----------
    kinds : type or tuple of types
        Of the errors.
    meaning : callable
        Returns, for one, the error to raise instead; None to let it be.
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
            del told  # its traceback has this frame
