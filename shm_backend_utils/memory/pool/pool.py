"""The slot pool: regions that are taken for a call, held while arrays over them live, and used again."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BudgetError, ClosedError, MachineError, PoolExhaustedError
from ...protocol.layout import PAGE_SIZE, data_offset
from ..forks import forsake_in_children
from ..repeater import Repeater
from ..rounding import roomy
from .inventory import Inventory
from .options import PoolOptions, PoolStatus
from .slot import SlotRegion

__all__ = ["Grant", "Need", "SlotPool", "Ticket", "region_size"]

Memory = npt.NDArray[np.uint8]

_LOG: Final = logging.getLogger(__name__)
_QUARANTINE_ROUND_S: Final = 0.05
_FINALIZERS_PATIENCE_S: Final = 1.0
_PARTS_OF_THE_BUDGET: Final = 4


class Need(NamedTuple):
    """What a call needs of a region.

    Attributes
    ----------
    byte_size : int
        Bytes of data.
    slot_count : int
    record_byte_size : int
        Of each slot's record.
    group : str
        Regions of different groups are never exchanged.
    """

    byte_size: int
    slot_count: int = 1
    record_byte_size: int = PAGE_SIZE
    group: str = "direct"


@dataclass(frozen=True, eq=False)
class Grant:
    """An idle region, or permission to make a new one in the room that others leave, which are destroyed first."""

    region: SlotRegion | None
    evicted: tuple[SlotRegion, ...] = ()


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request for a region, in the queue or granted.

    Attributes
    ----------
    need : Need
    byte_size : int
        Of the whole region, if one is made.
    holder : object
        Who asks; its text names it to people.
    granted : Future of Grant
    """

    need: Need
    byte_size: int
    holder: object
    granted: concurrent.futures.Future[Grant]


class SlotPool:
    """Keeps regions for reuse. Thread-safe, and first come, first served.

    A region is given back by itself, when its memory and every array made from it are gone. That happens in finalizers,
    which may run in any thread at any point, also inside a locked section of this class. So neither giving back nor
    taking an idle region waits for a lock: a deque's appends and pops are atomic. Only where somebody waits, or a
    region needs care, a finalizer tries the lock; if it is taken, whoever has it looks again after letting go.

    A region that comes back in doubt goes into quarantine until it can be reclaimed.

    Parameters
    ----------
    options : PoolOptions
    tend : callable, optional
        Done whenever regions may have been let go of; returns whether it wants to be soon again.

    Attributes
    ----------
    options : PoolOptions
    is_forked : bool
        Whether this is a copy, in a forked child, of its parent's pool.
    wait_count : int
        How many calls had to wait.
    """

    def __init__(self, options: PoolOptions, tend: Callable[[], bool] | None = None) -> None:
        self.options = options
        self._tend = tend
        self.wait_count = 0
        self._inventory = Inventory(options.max_bytes or _half_of_shared_memory())
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._granted: dict[Ticket, Grant] = {}  # and not redeemed yet
        self._returned: deque[SlotRegion] = deque()  # in need of care
        self._watched: dict[int, tuple[weakref.ref[Memory], SlotRegion]] = {}  # by the reference's id
        self.is_forked = False
        self._closed = False
        self._is_due = False  # something was given back that somebody waits for
        self._is_doomed = False  # closed, but not cleared yet
        self._housekeeper: Repeater | None = None
        forsake_in_children(self)

    def take_idle(self, need: Need, holder: object) -> tuple[SlotRegion, Memory] | None:
        """Return a region that is free, and its memory; None if there is none, or others wait.

        Takes no lock. :meth:`request` is for the others.
        """
        if self._queue or self._closed:
            return None
        for capacity, regions in self._inventory.shelves.get(need[1:], ()):
            if capacity >= need.byte_size:
                try:
                    region = regions.pop()
                except IndexError:
                    continue
                region.holder = holder  # what follows is :meth:`_hold`, on the way of every call
                memory = np.frombuffer(region.buffer, np.uint8)
                reference = weakref.ref(memory, self._give_back)
                self._watched[id(reference)] = reference, region
                return region, memory
        return None

    def request(self, need: Need, holder: object) -> Ticket:
        """Ask for a region. The ticket may be granted at once, or wait its turn.

        Raises
        ------
        BudgetError
            The pool may never have that much.
        ClosedError
            The pool was closed.
        """
        whole_size = self._whole_size(need)
        ticket = Ticket(need, whole_size, holder, concurrent.futures.Future())
        if whole_size > self._inventory.max_bytes:
            raise BudgetError(
                f"the call needs {whole_size} bytes of shared memory, but the pool may have "
                f"{self._inventory.max_bytes}; raise PoolOptions(max_bytes=...), or send less at once"
            )
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("this client")
                self._queue.append(ticket)
                self._serve()
                who = "" if ticket.granted.done() else f"{self._inventory}, and {len(self._queue)} calls wait"
                self.wait_count += bool(who)
            self._settle()
            if who:
                _LOG.warning("the pool has run dry: %s", who)
                if self._housekeeper is not None:
                    self._housekeeper.hurry()
        except BaseException:  # an interrupt: the caller has no ticket to give up
            self.withdraw(ticket)
            raise
        return ticket

    def redeem(self, ticket: Ticket, deadline: float = math.inf) -> tuple[SlotRegion, Memory]:
        """Return the region of a granted ticket, which may have to be made, and its memory.

        When the memory and every array made from it are gone, the region is given back.

        Parameters
        ----------
        ticket : Ticket
            As :meth:`request` gave it.
        deadline : float
            When making it must be over, by ``time.monotonic()``.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left.
        TimeoutError
            It cannot be made in time.
        """
        grant = ticket.granted.result()
        with self._lock:
            if self._granted.pop(ticket, None) is None:
                raise ClosedError("this client")
        region = grant.region
        try:
            self._settle()
            if region is None:
                region = self._make(ticket, grant, deadline)
            memory = self._hold(region, ticket.holder)  # from here on it comes back by itself, whatever is raised
        except BaseException:
            if region is not None:
                self._return_unless_held(region)
            raise
        if grant.region is None and self.options.prefault:
            region.prefault(deadline)
        return region, memory

    def withdraw(self, ticket: Ticket) -> None:
        """Give up a ticket, granted or not; it cannot be redeemed then. Nothing happens if it was redeemed."""
        with self._lock:
            if ticket in self._queue:
                self._queue.remove(ticket)
            grant = self._granted.pop(ticket, None)
            if grant is not None:
                self._take_back(ticket, grant)
            self._serve()
        self._settle()

    def exhausted(self, ticket: Ticket, waited_s: float) -> PoolExhaustedError:
        """Return the error for a ticket that was not granted in time."""
        with self._lock:
            who = str(self._inventory)
        self._settle()
        return PoolExhaustedError(
            f"no {ticket.byte_size} bytes of shared memory became free within {waited_s:.3g} s: {who}. "
            "Release results sooner, or raise PoolOptions(max_bytes=...)"
        )

    def held(self) -> list[tuple[SlotRegion, Memory]]:
        """Return the regions that are in use, each with its memory."""
        watched = [(region, reference()) for reference, region in list(self._watched.values())]
        return [(region, memory) for region, memory in watched if memory is not None]

    def drop_idle(self) -> None:
        """Destroy every region that nobody holds."""
        with self._lock:
            self._sort_returned()
            self._inventory.destroy_idle()
        self._settle()

    @property
    def stream_guess_bytes(self) -> int:
        """How much a stream may take for outputs whose size nobody knows yet."""
        return min(self.options.stream_guess_bytes, self._inventory.max_bytes // _PARTS_OF_THE_BUDGET)

    @property
    def status(self) -> PoolStatus:
        """What the pool has now."""
        with self._lock:
            self._serve()
            status = self._inventory.status()
        self._settle()
        return status

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered regions that were destroyed since the last time: to be unregistered."""
        return self._inventory.take_unregistered()

    def close(self) -> None:
        """Remove all regions, and fail whoever waits. Arrays over them stay valid. Twice is fine.

        In a forked child it does nothing: the regions are the parent's.
        """
        if self.is_forked:
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
        if self.is_forked:
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
        """Forget every region, in a forked child. Arrays over them stay valid."""
        self.is_forked = True
        self._lock = threading.Lock()  # one of the parent's other threads may have held it, and does not run here
        self._inventory.forsake()
        self._queue.clear()

    def _return_unless_held(self, region: SlotRegion) -> None:
        """Give back a region whose taker was interrupted, unless it has a memory, which does so itself."""
        if not any(region is held for _, held in list(self._watched.values())):
            region.holder = None
            self._returned.append(region)
            self._settle()

    def _hold(self, region: SlotRegion, holder: object) -> Memory:
        region.holder = holder
        memory = np.frombuffer(region.buffer, np.uint8)
        reference = weakref.ref(memory, self._give_back)
        self._watched[id(reference)] = reference, region
        return memory

    def _give_back(self, memory: weakref.ref[Memory]) -> None:
        watched = self._watched.pop(id(memory), None)
        if watched is None:
            return  # its taker was interrupted before it was watched, and has given the region back
        region = watched[1]
        region.holder = None
        if region.is_spoiled or region.is_in_doubt or self._closed:
            self._returned.append(region)
            self._settle()
            return
        self._inventory.put_back(region)
        if self._queue:
            self._is_due = True
            self._settle()

    def _settle(self) -> None:
        """Look at what was given back, unless somebody else has the lock: that one looks when it has let go."""
        while (self._returned or self._is_due or self._is_doomed) and self._lock.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._lock.release()

    def _sort_returned(self) -> None:
        """Destroy, reclaim, or put into quarantine what needs care. Locked."""
        while self._returned:
            self._inventory.care_for(self._returned.popleft())
        self._inventory.retry_quarantined()

    def _serve(self) -> None:
        """Grant what can be granted, in order. Locked."""
        self._is_due = False
        self._sort_returned()
        if self._closed:
            self._clear()
        while self._queue:
            ticket = self._queue[0]
            grant = self._grant(ticket)
            if grant is None:
                return
            self._granted[ticket] = grant  # first, so that whatever is raised from here on, it can be taken back
            self._queue.popleft()
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_result(grant)
            else:
                self._take_back(ticket, self._granted.pop(ticket))

    def _clear(self) -> None:
        self._is_doomed = False
        self._inventory.destroy_all()
        while self._granted:
            self._take_back(*self._granted.popitem())
        for ticket in self._queue:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(ClosedError("this client"))
        self._queue.clear()

    def _grant(self, ticket: Ticket) -> Grant | None:
        need = ticket.need
        region = self._inventory.take(need.byte_size, need[1:])
        if region is not None:
            region.holder = ticket.holder
            return Grant(region)
        evicted = self._inventory.promise(ticket.byte_size, need[1:])
        return None if evicted is None else Grant(None, tuple(evicted))

    def _take_back(self, ticket: Ticket, grant: Grant) -> None:
        if grant.region is not None:
            grant.region.holder = None
            self._returned.append(grant.region)
            return
        self._inventory.unpromise(ticket.byte_size)
        self._inventory.bury(grant.evicted)

    def _make(self, ticket: Ticket, grant: Grant, deadline: float) -> SlotRegion:
        region: SlotRegion | None = None
        try:
            self._inventory.bury(grant.evicted)
            region = self._make_region(ticket, deadline)
            region.holder = ticket.holder
            with self._lock:
                if self._closed:  # before it is added: whoever closes takes back what the added ones were promised
                    raise ClosedError("this client")
                self._inventory.add(region, ticket.need[1:])
                if self._housekeeper is None:
                    self._housekeeper = Repeater(self._keep_house, self._patience(), "shm pool")
        except BaseException:
            with self._lock:
                self._inventory.undo(region, ticket.byte_size)
                self._serve()
            self._settle()
            raise
        self._settle()
        return region

    def _make_region(self, ticket: Ticket, deadline: float) -> SlotRegion:
        _, slot_count, record_byte_size, _ = ticket.need
        data_size = ticket.byte_size - data_offset(slot_count, record_byte_size)
        try:
            return SlotRegion(data_size, slot_count, record_byte_size, self.options.access, deadline)
        except MachineError:  # somebody else has taken the room; what lies idle here may be enough
            self.drop_idle()
            return SlotRegion(data_size, slot_count, record_byte_size, self.options.access, deadline)

    def _keep_house(self) -> float:
        """Look after what is in quarantine, and let go of what nobody has used for long."""
        with self._lock:
            self._serve()
            self._inventory.destroy_idle(before=time.monotonic() - self.options.idle_s)
        self._settle()
        is_urgent = self._tend is not None and self._tend()
        return _QUARANTINE_ROUND_S if is_urgent else self._patience()

    def _whole_size(self, need: Need) -> int:
        """Return the size of a region for this much data, with room for similar calls if the budget has it."""
        larger = region_size(need)
        if larger <= self._inventory.max_bytes:
            return larger
        return max(-(-need.byte_size // PAGE_SIZE), 1) * PAGE_SIZE + data_offset(need.slot_count, need.record_byte_size)

    def _patience(self) -> float:
        is_urgent = self._inventory.quarantined or self._queue
        return _QUARANTINE_ROUND_S if is_urgent else max(self.options.idle_s / 2, _QUARANTINE_ROUND_S)


def region_size(need: Need) -> int:
    """Return the size of the region that a pool makes for a need: similar calls fit in it, too."""
    return roomy(max(need.byte_size, 1), PAGE_SIZE) + data_offset(need.slot_count, need.record_byte_size)


def _half_of_shared_memory() -> int:
    space = os.statvfs("/dev/shm")
    return space.f_blocks * space.f_frsize // 2
