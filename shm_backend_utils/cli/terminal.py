"""Parts that all commands share: numeric arguments, signals that end a command, exit statuses, text for a terminal."""

from __future__ import annotations

import argparse
import contextlib
import pwd
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

__all__ = [
    "ENDING",
    "OWNER",
    "Interrupted",
    "age",
    "exit_status",
    "port",
    "positive",
    "positive_float",
    "printable",
    "raise_on_signals",
    "size",
    "undisturbed",
    "user",
]

ENDING: Final = (signal.SIGINT, signal.SIGTERM)

OWNER: Final = {True: "alive", False: "dead", None: "unknown"}  # by whether memory's owner is alive


class Interrupted(BaseException):
    """A signal asks the program to end. Not an Exception, so no code catches it by accident."""

    def __init__(self, number: int) -> None:
        self.number = number


def raise_on_signals() -> None:
    """Raise :class:`Interrupted` at the first signal; ignore later ones, which must not interrupt the cleanup."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    for each in ENDING:
        signal.signal(each, interrupt)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay those signals until the end of the block: an interrupted cleanup would leave things behind."""
    # A signal mask is per thread: another thread would take the signal, and Python would still run the handler here.
    if threading.current_thread() is not threading.main_thread():  # only there handlers run
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


def positive(text: str) -> int:
    """Read a whole number of 1 or more, as an argument parser's ``type``."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return number


def positive_float(text: str) -> float:
    """Read a number above 0, as an argument parser's ``type``."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("expected more than 0")
    return number


def port(text: str) -> int:
    """Read a TCP port, as an argument parser's ``type``; a server would accept other numbers, and use another port."""
    number = int(text)
    if not 0 < number < 1 << 16:
        raise argparse.ArgumentTypeError("expected a port, 1 to 65535")
    return number


def exit_status(program: Callable[[], int], *errors: type[Exception]) -> int:
    """Run a program that cleans up when a signal ends it; print the given errors and OSError; return the status."""
    expected: tuple[type[Exception], ...] = (*errors, OSError)
    try:
        raise_on_signals()
        return program()
    except expected as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.number


def printable(text: str) -> str:
    """Return the name of a file, a program or a model, without characters that a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def user(uid: int) -> str:
    """Return a user's name, or the id if this machine knows no name for it."""
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
