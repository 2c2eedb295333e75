"""Forked children drop their parent's locks, which they would keep alive, and its memory, which they must not free."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final, Protocol, TypeVar

__all__ = ["HasAfterFork", "call_after_fork", "never_destroy", "owners_of_kind"]

T = TypeVar("T")


class HasAfterFork(Protocol):
    """An object of one process alone."""

    def after_fork(self) -> None:
        """Forget everything, in a forked child, where nothing else runs yet."""


def call_after_fork(owner: HasAfterFork) -> None:
    """Have :meth:`~HasAfterFork.after_fork` of an object called in every child that is forked while it lives."""
    _OWNERS.add(weakref.ref(owner, _OWNERS.discard))


def owners_of_kind(kind: type[T]) -> list[T]:
    """Return the living objects of a class, a parent's too, that were given to :func:`call_after_fork`."""
    return [each for each in _living() if isinstance(each, kind)]


def never_destroy(kept: object) -> None:
    """Let an object live as long as this process: its end would disturb a connection that forked processes share."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_OWNERS: Final[set[weakref.ref[HasAfterFork]]] = set()
"""A plain set is copied in one step, where a WeakSet fails if another thread adds to it meanwhile."""


def _living() -> list[HasAfterFork]:
    return [owner for reference in list(_OWNERS) if (owner := reference()) is not None]


def _call_all() -> None:
    for owner in _living():
        owner.after_fork()


os.register_at_fork(after_in_child=_call_all)  # once, as Python keeps it for ever
