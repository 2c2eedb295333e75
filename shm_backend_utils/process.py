"""Callbacks after a fork, and warnings about unclosed objects with the lines of the user's code that made them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

__all__ = ["NOT_THE_USERS", "HasAfterFork", "Origin", "Unclosed", "call_after_fork", "never_destroy", "owners_of_kind"]

T = TypeVar("T")


class HasAfterFork(Protocol):
    """An object that belongs to one process."""

    def after_fork(self) -> None:
        """Drop the parent's state, in a forked child, before anything else runs there."""


def call_after_fork(owner: HasAfterFork) -> None:
    """Call :meth:`~HasAfterFork.after_fork` of an object in every child that is forked while the object lives."""
    _OWNERS.add(weakref.ref(owner, _OWNERS.discard))


def owners_of_kind(kind: type[T]) -> list[T]:
    """Return a class's living objects that were given to :func:`call_after_fork`, here or in a parent process."""
    return [each for each in _living() if isinstance(each, kind)]


def never_destroy(kept: object) -> None:
    """Keep an object until this process ends: destroying it would disturb a connection that forked processes share."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_OWNERS: Final[set[weakref.ref[HasAfterFork]]] = set()
"""A plain set: a copy of it is atomic, but iteration over a WeakSet fails if another thread adds to it."""


def _living() -> list[HasAfterFork]:
    return [owner for reference in list(_OWNERS) if (owner := reference()) is not None]


def _call_all() -> None:
    for owner in _living():
        owner.after_fork()


os.register_at_fork(after_in_child=_call_all)  # once: Python cannot unregister it


NOT_THE_USERS: Final = tuple(
    f"{Path(file).parent}/" for file in (__file__, asyncio.__file__, concurrent.futures.__file__)
)


class Origin(NamedTuple):
    """A line of the user's code: cheap to record, and looked up only when it is shown."""

    what: str  # the user's action there
    code: CodeType  # of the function, or module
    instruction: int  # its offset; ``line`` finds the line's number later, which is slow in a long function

    @property
    def line(self) -> int:
        """The number of the line in its file."""
        for begin, end, line in self.code.co_lines():
            if begin <= self.instruction < end and line is not None:
                return line
        return self.code.co_firstlineno

    @classmethod
    def here(cls, what: str) -> Origin:
        """Return the line of the user's code that the calling thread is executing."""
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
            frame = frame.f_back
        return cls(what, frame.f_code, frame.f_lasti)

    def __str__(self) -> str:
        return f"{self.what} at {self.code.co_filename}:{self.line}"


class Unclosed:
    """A member of a closable object: warns if that object is garbage-collected unclosed, except in forked children.

    The ResourceWarning names the line of ``origin``; ``remedy`` says how to close the object. ``rest`` returns text to
    insert before it, or None if the object was closed with another one.
    """

    __slots__ = ("_is_closed", "_origin", "_process", "_remedy", "_rest")

    def __init__(self, origin: Origin, remedy: str, rest: Callable[[], str | None] = str) -> None:
        self._origin = origin
        self._remedy = remedy
        self._rest = rest
        self._is_closed = False
        self._process = os.getpid()

    def close(self) -> None:
        """Cancel the warning. Twice is fine."""
        self._is_closed = True

    # At interpreter exit, this module's globals may be gone before the last object; the defaults keep these alive.
    def __del__(self, getpid: Any = os.getpid, warn: Any = warnings.warn_explicit, modules: Any = sys.modules) -> None:
        if self._is_closed or getpid() != self._process or not modules:
            return
        rest = self._rest()
        if rest is not None:
            origin = self._origin
            text = f"{origin} was not closed{rest}; {self._remedy}"
            warn(text, ResourceWarning, origin.code.co_filename, origin.line)
