"""Turn the signals that ask a program to end into an exception, so that everything is cleaned up on the way out."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

__all__ = ["Interrupted", "raise_on_signals"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asks the program to end. Not an Exception, so that nobody catches it by accident."""

    def __init__(self, number: int) -> None:
        self.number = number


def raise_on_signals() -> None:
    """Raise :class:`Interrupted` at the first signal; ignore all that follow, which must not interrupt the cleaning."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    for each in _SIGNALS:
        signal.signal(each, interrupt)
