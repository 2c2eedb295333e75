"""Signals that ask a program to end: they end what it does, and wait for what it cleans up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["ENDING", "Interrupted", "raise_on_signals", "undisturbed"]

ENDING: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asks the program to end. Not an Exception, so that nobody catches it by accident."""

    def __init__(self, number: int) -> None:
        self.number = number


def raise_on_signals() -> None:
    """Raise :class:`Interrupted` at the first signal; ignore all that follow, which must not interrupt the cleaning."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    for each in ENDING:
        signal.signal(each, interrupt)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have those signals wait until the block is left, which cleans up: half of that would leave the rest behind.

    Not by a mask, which is a thread's own: another thread would take the signal, and this one be told.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if came:
        signal.raise_signal(came[0])
