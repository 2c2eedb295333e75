"""Regions in use, which come back by themselves when the last array over them is gone."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import numpy as np
import numpy.typing as npt

from ..repeater import Repeater
from .inventory import Inventory
from .need import FAR_MORE, SMALL, Need
from .slot import SlotRegion
from .states import SPOILED
from .tickets import TicketQueue

__all__ = ["HoldingPool", "Memory"]

Memory = npt.NDArray[np.uint8]


class HoldingPool:
    """What a pool does without waiting: it hands out regions that lie idle, and has them back.

    A region is given back by itself, when its memory and every array made from it are gone. That happens in finalizers,
    which may run in any thread at any point, also inside a locked section of this class. So neither giving back nor
    taking an idle region takes a lock: a deque's appends and pops are atomic. Where somebody waits, or a region needs
    care, a finalizer hurries the housekeeper, a thread that may wait for the lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self._inventory = Inventory(max_bytes)
        self._tickets = TicketQueue(self._inventory)
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[weakref.ref[Memory], SlotRegion]] = {}  # by the reference's id
        self._closed = False
        self._housekeeper: Repeater | None = None

    def take_idle(self, need: Need, holder: object) -> tuple[SlotRegion, Memory] | None:
        """Return a region that is free, and its memory; None if there is none, as in a closed pool, or others wait.

        Takes no lock. :meth:`.SlotPool.request` is for the others.
        """
        if self._tickets.waiting:
            return None
        least, most = need.byte_size, max(FAR_MORE * need.byte_size, SMALL)
        for capacity, regions in self._inventory.shelves.get(need[1:], ()):
            if least <= capacity <= most:
                try:
                    region = regions.pop()
                except IndexError:
                    continue
                if region.slots[0].state == SPOILED:
                    self._inventory.returned.append(region)
                    return None
                region.holder = holder  # what follows is :meth:`_hold`, on the way of every call
                memory = np.frombuffer(region.buffer, np.uint8)
                reference = weakref.ref(memory, self._give_back)
                self._watched[id(reference)] = reference, region
                return region, memory
        return None

    def held(self) -> list[tuple[SlotRegion, Memory]]:
        """Return the regions that are in use, each with its memory."""
        watched = [(region, reference()) for reference, region in list(self._watched.values())]
        return [(region, memory) for region, memory in watched if memory is not None]

    def _hold(self, region: SlotRegion, holder: object) -> Memory:
        region.holder = holder
        memory = np.frombuffer(region.buffer, np.uint8)
        reference = weakref.ref(memory, self._give_back)
        self._watched[id(reference)] = reference, region
        return memory

    def _give_back(self, memory: weakref.ref[Memory]) -> None:
        # Python swallows what is raised in here, an interrupt too. Until it lies in its place the region is watched, so
        # that :meth:`_find_dropped` finds it; one line does both.
        number = id(memory)
        watched = self._watched.get(number)
        if watched is None:
            return  # its taker was interrupted before it was watched: the region is found as a lost one
        if self._closed:
            self._watched.pop(number, None)
            return
        region = watched[1]
        region.holder = None
        is_ready = region.is_reusable
        place = region.shelf if is_ready else self._inventory.returned
        assert place is not None
        region.idle_since = time.monotonic()
        try:
            place.append(self._watched.pop(number)[1])
        except KeyError:
            return  # it was found before
        if self._tickets.waiting or not is_ready:
            self._hurry()

    def _find_dropped(self) -> None:
        """Have back what no finalizer has given back, as it was interrupted."""
        for number, (reference, region) in self._watched.copy().items():  # a finalizer may change it
            if reference() is None:
                region.holder = None
                with contextlib.suppress(KeyError):  # it was given back meanwhile
                    self._inventory.returned.append(self._watched.pop(number)[1])

    def _hurry(self) -> None:
        if self._housekeeper is not None:
            self._housekeeper.hurry()

    def _serve(self) -> None:
        """Sort what was given back, then grant what can be granted; clear a closed pool. The caller has the lock."""
        self._find_dropped()
        self._inventory.sort_returned()
        if self._closed:
            self._clear()
        self._tickets.serve()

    def _clear(self) -> None:
        self._inventory.destroy_all()
        self._tickets.clear()
