"""What a forked child must not share with its parent: locks that it would keep alive, memory that it must not free."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final, Protocol, TypeVar

__all__ = ["Forsakable", "forsake_in_children", "never_destroy", "owners_of_kind"]


T = TypeVar("T")


class Forsakable(Protocol):
    """What is its process' own."""

    def forsake(self) -> None:
        """Forget everything, in a forked child. Nothing else runs in it yet."""


def forsake_in_children(owner: Forsakable) -> None:
    """Have an object forsake what it has in every child that is forked while it lives."""
    _OWNERS.add(weakref.ref(owner, _OWNERS.discard))


def owners_of_kind(kind: type[T]) -> list[T]:
    """Return the objects of a class that `forsake_in_children` has and that still live; a parent's too."""
    return [each for each in _living() if isinstance(each, kind)]


def never_destroy(kept: object) -> None:
    """Let an object live as long as this process: its end would disturb a connection that forked processes share."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_OWNERS: Final[set[weakref.ref[Forsakable]]] = set()
"""A WeakSet fails whoever goes through it while another thread adds to it; a copy of a set is made at once.

Python keeps what is registered for forks as long as the process lives. So one function is, for all owners."""


def _living() -> list[Forsakable]:
    return [owner for reference in list(_OWNERS) if (owner := reference()) is not None]


def _forsake_all() -> None:
    for owner in _living():
        owner.forsake()


os.register_at_fork(after_in_child=_forsake_all)
