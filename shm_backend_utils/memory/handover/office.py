"""What this process offers to models, and whether it has a desk for that."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Final

from ...forks import forsake_in_children
from ...protocol.handover import SealedKey
from ..access import Access
from ..descriptors import Descriptor
from .closing import Closer
from .desk import Desk, Offer

__all__ = ["OFFICE", "Office"]


class Office:
    """What this process hands over, and the desk for it. What finalizers call takes no lock."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # a forked child goes on where its parent is
        self._closer = Closer()
        self._begin()
        forsake_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._desk: Desk | None = None  # locked where it changes
        self._offers: dict[int, Offer] = {}
        self._issued: dict[int, weakref.ref[_DeskName]] = {}  # what was not offered yet, by number

    def new_key(self) -> SealedKey:
        """Return a key that nobody else has ever had, as long as that object lives, and have a desk that listens."""
        with self._lock:
            desk = self._desk
            if desk is None:
                desk = self._desk = Desk(self._offers, self._closer, self._ends)
            number = next(self._numbers)
            name = _DeskName(desk.name)
            self._issued[number] = weakref.ref(name, lambda _: self._forget(number))
        desk.wait_until_open()
        return SealedKey(name, number)

    def offer(self, key: SealedKey, token: bytes, access: Access, copy: Callable[[], Descriptor]) -> None:
        """Hand a region to models that know the token and have access, as this user and root do, until it is withdrawn.

        ``copy`` returns the region's descriptor, opened anew: locks belong to open file descriptions, and who is given
        one could release its locks. It is called in another thread; what it opens must stay open until the key is
        withdrawn. ValueError if the key was withdrawn, or is another process'.
        """
        if key.number not in self._issued:
            raise ValueError("a region is offered under a key that was withdrawn, or that another process has made")
        self._offers[key.number] = Offer(token, access, copy)
        self._issued.pop(key.number, None)

    def renew(self, key: SealedKey, token: bytes) -> None:
        """Hand a region over to those who know another token; KeyError if it was withdrawn."""
        self._offers[key.number] = self._offers[key.number]._replace(token=token)

    def withdraw(self, key: SealedKey) -> None:
        """Hand a region over no longer. Twice is fine. Takes no lock, so that finalizers may call it."""
        self._forget(key.number)

    def forsake(self) -> None:
        """Forget all that the parent has, in a forked child: its desk is not here."""
        self._begin()

    def _forget(self, number: int) -> None:
        self._offers.pop(number, None)
        self._issued.pop(number, None)
        desk = self._desk
        if desk is not None and not self._offers:
            desk.wake()

    def _ends(self, desk: Desk) -> bool:
        """Return whether a desk has nothing to do any more. Asked by its thread; the next key gets another desk."""
        with self._lock:
            if self._desk is desk:
                if self._has_keys and not desk.has_failed:
                    return False
                self._desk = None
            return True

    @property
    def _has_keys(self) -> bool:
        return bool(self._offers) or any(name() is not None for name in list(self._issued.values()))


class _DeskName(str):
    """The name in one key, so that it shows when an interrupt has lost that key before its region was offered."""

    __slots__ = ("__weakref__",)


OFFICE: Final = Office()
"""This process' office. There is one, as one thread and one socket serve all regions of all pools."""
