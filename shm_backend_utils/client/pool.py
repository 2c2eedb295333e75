"""Slots of shared memory, shared by all calls of a client: taken, held, given back, up to a budget."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, MachineError
from ..memory.repeater import Repeater
from ..memory.rounding import roomy
from ..protocol.region_layout import PAGE_SIZE, data_offset
from .errors import BudgetError, PoolExhaustedError
from .forks import forsake_in_children
from .origin import Origin
from .pool_options import PoolOptions, PoolStatus
from .shelf import Shelf
from .slot import Slot

__all__ = ["Grant", "SlotPool", "Ticket", "region_size"]

Memory = npt.NDArray[np.uint8]

_LOG: Final = logging.getLogger(__name__)
_QUARANTINE_ROUND_S: Final = 0.05
_FINALIZERS_PATIENCE_S: Final = 1.0


@dataclass(frozen=True, eq=False)
class Grant:
    """An idle slot, or permission to make a new one in the room that others leave, which are destroyed first."""

    slot: Slot | None
    evicted: tuple[Slot, ...] = ()


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request for a slot, in the queue or granted.

    Attributes
    ----------
    data_size : int
        The bytes of data that it must have.
    byte_size : int
        Of the whole region, if one is made.
    """

    data_size: int
    byte_size: int
    turn_count: int
    group: str
    origin: Origin
    granted: concurrent.futures.Future[Grant]


class SlotPool:
    """Keeps slots for reuse. Thread-safe, and first come, first served.

    A slot is given back by itself, when its memory and every array made from it are gone. That happens in finalizers,
    which may run in any thread at any point, also inside a locked section of this class. So giving back waits for no
    lock: it puts the slot down, and whoever has the lock looks there before, and after.

    A slot that comes back in doubt goes into quarantine until it can be reclaimed.

    Parameters
    ----------
    options : PoolOptions
    tend : callable, optional
        Done whenever slots may have been let go of; returns whether it wants to be soon again.

    Attributes
    ----------
    is_a_forks : bool
        Whether this is a copy, in a forked child, of its parent's pool.
    wait_count : int
        How many calls had to wait.
    """

    def __init__(self, options: PoolOptions, tend: Callable[[], bool] | None = None) -> None:
        self.options = options
        self._tend = tend
        self.wait_count = 0
        self._shelf = Shelf(options.max_bytes or _half_of_shared_memory())
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._granted: set[Ticket] = set()  # and not redeemed yet
        self._returned: deque[Slot] = deque()
        self._watched: dict[int, tuple[weakref.ref[Memory], Slot]] = {}  # by the reference's id
        self.is_a_forks = False
        self._closed = False
        self._is_doomed = False  # closed, but not cleared yet
        self._housekeeper: Repeater | None = None
        forsake_in_children(self)

    def take_idle(self, byte_size: int, turn_count: int, group: str, origin: Origin) -> tuple[Slot, Memory] | None:
        """Return a slot that is free, and its memory, if one is and nobody waits; :meth:`request` is for the others."""
        with self._lock:
            if self._queue:
                return None
            self._sort_returned()
            slot = self._shelf.take(byte_size, turn_count, group, origin)
        return None if slot is None else (slot, self._watch(slot))

    def request(self, byte_size: int, turn_count: int, group: str, origin: Origin) -> Ticket:
        """Ask for a slot with this many bytes of data. The ticket may be granted at once, or wait its turn.

        Slots of different groups are never exchanged.

        Raises
        ------
        BudgetError
            The pool may never have that much.
        ClosedError
            The pool was closed.
        """
        whole_size = self._whole_size(byte_size, turn_count)
        ticket = Ticket(byte_size, whole_size, turn_count, group, origin, concurrent.futures.Future())
        if whole_size > self._shelf.max_bytes:
            raise BudgetError(
                f"the call needs {whole_size} bytes of shared memory, but the pool may have "
                f"{self._shelf.max_bytes}; raise PoolOptions(max_bytes=...), or send less at once"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("this client")
            self._queue.append(ticket)
            self._serve()
            who = "" if ticket.granted.done() else f"{self._shelf}, and {len(self._queue)} calls wait"
            self.wait_count += bool(who)
        self._settle()
        if who:
            _LOG.warning("the pool has run dry: %s", who)
            if self._housekeeper is not None:
                self._housekeeper.hurry()
        return ticket

    def redeem(self, ticket: Ticket) -> tuple[Slot, Memory]:
        """Return the slot of a granted ticket, which may have to be made, and its memory.

        When the memory and every array made from it are gone, the slot is given back.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left.
        """
        grant = ticket.granted.result()
        with self._lock:
            if ticket not in self._granted:
                raise ClosedError("this client")
            self._granted.remove(ticket)
        self._settle()
        slot = grant.slot or self._make(ticket, grant)
        return slot, self._watch(slot)

    def withdraw(self, ticket: Ticket) -> None:
        """Give up a ticket, granted or not; it cannot be redeemed then. Nothing happens if it was redeemed."""
        with self._lock:
            if ticket in self._queue:
                self._queue.remove(ticket)
            elif ticket in self._granted:
                self._granted.remove(ticket)
                self._take_back(ticket, ticket.granted.result())
            self._serve()
        self._settle()

    def exhausted(self, ticket: Ticket, waited_s: float) -> PoolExhaustedError:
        """Return the error for a ticket that was not granted in time."""
        with self._lock:
            who = str(self._shelf)
        self._settle()
        return PoolExhaustedError(
            f"no {ticket.byte_size} bytes of shared memory became free within {waited_s:.3g} s: {who}. "
            "Release results sooner, or raise PoolOptions(max_bytes=...)"
        )

    def drop_idle(self) -> None:
        """Destroy every slot that nobody holds."""
        with self._lock:
            self._sort_returned()
            self._shelf.destroy(list(self._shelf.idle))
        self._settle()

    @property
    def status(self) -> PoolStatus:
        """What the pool has now."""
        with self._lock:
            self._serve()
            shelf = self._shelf
            status = PoolStatus(
                len(shelf.held), len(shelf.idle), len(shelf.quarantined), shelf.byte_size, shelf.max_bytes
            )
        self._settle()
        return status

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered slots that were destroyed since the last time: to be unregistered."""
        return self._shelf.take_unregistered()

    def close(self) -> None:
        """Remove all slots, and fail whoever waits. Arrays over them stay valid. Twice is fine.

        In a forked child it does nothing: the slots are the parent's.
        """
        if self.is_a_forks:
            return
        self._closed = True
        with self._lock:
            self._clear()
        housekeeper, self._housekeeper = self._housekeeper, None
        if housekeeper is not None:
            housekeeper.stop()

    def abandon(self) -> None:
        """Close, from a finalizer: if that has interrupted its own thread's locked section, it cannot wait for it.

        Then that section, or the next one, does it.
        """
        if self.is_a_forks:
            return
        self._closed = True
        if self._lock.acquire(timeout=_FINALIZERS_PATIENCE_S):
            try:
                self._clear()
            finally:
                self._lock.release()
        else:
            self._is_doomed = True
        if self._housekeeper is not None:
            self._housekeeper.stop_some_time()

    def forsake(self) -> None:
        """Forget every slot, in a forked child. Arrays over them stay valid."""
        self.is_a_forks = True
        self._shelf.forsake()
        self._queue.clear()

    def _clear(self) -> None:
        self._is_doomed = False
        self._shelf.destroy(self._shelf.everything())
        for ticket in self._granted:
            self._take_back(ticket, ticket.granted.result())
        self._granted.clear()
        for ticket in self._queue:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(ClosedError("this client"))
        self._queue.clear()

    def _watch(self, slot: Slot) -> Memory:
        memory = slot.memory()
        reference = weakref.ref(memory, self._give_back)
        self._watched[id(reference)] = reference, slot
        return memory

    def _give_back(self, memory: weakref.ref[Memory]) -> None:
        _, slot = self._watched.pop(id(memory))
        self._returned.append(slot)
        if self._queue or slot.is_spoiled:
            self._settle()

    def _settle(self) -> None:
        """Look at what was given back, unless somebody else has the lock: that one looks when it has let go."""
        while (self._returned or self._is_doomed) and self._lock.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._lock.release()

    def _sort_returned(self) -> None:
        if self._returned or self._shelf.quarantined:
            returned = []
            while self._returned:
                returned.append(self._returned.popleft())
            self._shelf.put_back(returned)

    def _serve(self) -> None:
        """Grant what can be granted, in order. Locked."""
        self._sort_returned()
        if self._closed:
            self._clear()
        while self._queue:
            ticket = self._queue[0]
            grant = self._grant(ticket)
            if grant is None:
                return
            self._queue.popleft()
            if ticket.granted.set_running_or_notify_cancel():
                self._granted.add(ticket)
                ticket.granted.set_result(grant)
            else:
                self._take_back(ticket, grant)

    def _grant(self, ticket: Ticket) -> Grant | None:
        slot = self._shelf.take(ticket.data_size, ticket.turn_count, ticket.group, ticket.origin)
        if slot is not None:
            return Grant(slot)
        evicted = self._shelf.promise(ticket.byte_size, ticket.group)
        return None if evicted is None else Grant(None, tuple(evicted))

    def _take_back(self, ticket: Ticket, grant: Grant) -> None:
        if grant.slot is not None:
            self._returned.append(grant.slot)
            return
        self._shelf.unpromise(ticket.byte_size)
        self._shelf.bury(grant.evicted)

    def _make(self, ticket: Ticket, grant: Grant) -> Slot:
        self._shelf.bury(grant.evicted)
        try:
            slot = self._make_slot(ticket)
        except BaseException:
            with self._lock:
                self._shelf.unpromise(ticket.byte_size)
                self._serve()
            self._settle()
            raise
        with self._lock:
            self._shelf.add(slot, ticket.group, ticket.origin)
            if self._closed:
                self._shelf.destroy([slot])
                raise ClosedError("this client")
            if self._housekeeper is None:
                self._housekeeper = Repeater(self._keep_house, self._patience(), "shm pool")
        self._settle()
        if self.options.prefault:
            slot.prefault()
        return slot

    def _make_slot(self, ticket: Ticket) -> Slot:
        data_size = ticket.byte_size - data_offset(ticket.turn_count)
        try:
            return Slot(data_size, ticket.turn_count, self.options.access)
        except MachineError:  # somebody else has taken the room; what lies idle here may be enough
            self.drop_idle()
            return Slot(data_size, ticket.turn_count, self.options.access)

    def _keep_house(self) -> float:
        """Look after what is in quarantine, and let go of what nobody has used for long."""
        with self._lock:
            self._serve()
            self._shelf.destroy(self._shelf.idle_before(time.monotonic() - self.options.idle_s))
        self._settle()
        is_urgent = self._tend is not None and self._tend()
        return _QUARANTINE_ROUND_S if is_urgent else self._patience()

    def _whole_size(self, byte_size: int, turn_count: int) -> int:
        """Return the size of a region for this much data, with room for similar calls if the budget has it."""
        larger = region_size(byte_size, turn_count)
        return larger if larger <= self._shelf.max_bytes else _least_region_size(byte_size, turn_count)

    def _patience(self) -> float:
        is_urgent = self._shelf.quarantined or self._queue
        return _QUARANTINE_ROUND_S if is_urgent else max(self.options.idle_s / 2, _QUARANTINE_ROUND_S)


def region_size(byte_size: int, turn_count: int) -> int:
    """Return the size of the region that a pool makes for this much data: similar calls fit in it, too."""
    return roomy(max(byte_size, 1), PAGE_SIZE) + data_offset(turn_count)


def _least_region_size(byte_size: int, turn_count: int) -> int:
    return max(-(-byte_size // PAGE_SIZE), 1) * PAGE_SIZE + data_offset(turn_count)


def _half_of_shared_memory() -> int:
    space = os.statvfs("/dev/shm")
    return space.f_blocks * space.f_frsize // 2
