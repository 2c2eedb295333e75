"""What command lines have in common: numbers that must be positive, and how a program ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from ..signals import Interrupted, raise_on_signals

__all__ = ["exit_status", "port", "positive", "positive_float"]


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
    """Read the number of a TCP port, as an argument parser's ``type``; a server takes others, and serves elsewhere."""
    number = int(text)
    if not 0 < number < 1 << 16:
        raise argparse.ArgumentTypeError("expected a port, 1 to 65535")
    return number


def exit_status(program: Callable[[], int], *errors: type[Exception]) -> int:
    """Run a program that cleans up when a signal ends it, and return its exit status.

    Of these errors, and of what the system refuses, only the message is printed: it says all that a user needs.
    """
    told: tuple[type[Exception], ...] = (*errors, OSError)
    try:
        raise_on_signals()
        return program()
    except told as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.number
