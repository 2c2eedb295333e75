"""The slot pool: makes regions for calls that wait, and ends those that nobody uses any more."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import BudgetError, ClosedError, MachineError, NoSharedMemoryError, PoolExhaustedError
from ...forks import forsake_in_children
from ...protocol.layout import data_offset
from ..kinds import RegionKind
from ..machine_memory import MORE_MEMORY, memory_bytes
from ..repeater import Repeater
from ..shared_file import MORE_ROOM, total_bytes
from .holding import HoldingPool, Memory
from .inventory import Promise
from .need import Need, least_size
from .options import PoolOptions, PoolStatus
from .parts import make_parts
from .slot import SlotRegion
from .tickets import Ticket

__all__ = ["SlotPool"]

_LOG: Final = logging.getLogger(__name__)
_QUARANTINE_ROUND_S: Final = 0.05
_FINALIZERS_PATIENCE_S: Final = 1.0
_PARTS_OF_THE_BUDGET: Final = 4
_PARTS_UNLOOKED: Final = 64


class SlotPool(HoldingPool):
    """Keeps regions for reuse. Thread-safe, and first come, first served.

    A region that comes back in doubt goes into quarantine until it can be reclaimed. ``tend`` is called whenever
    regions may have been let go of, and returns whether it wants to be soon again.
    """

    def __init__(self, options: PoolOptions, tend: Callable[[], bool] | None = None) -> None:
        super().__init__(options.budget_bytes(0))
        self.options = options
        self.is_forked = False  # a copy, in a forked child, of its parent's pool
        self.wait_count = 0  # how many calls had to wait
        self._looked_at = 0  # how many bytes there were at the last look at the budget
        self._tend = tend
        forsake_in_children(self)

    def request(self, need: Need, holder: object) -> Ticket:
        """Ask for a region. The ticket may be granted at once, or wait its turn.

        BudgetError if the pool may never have that much; NoSharedMemoryError if no pool may, or nobody has said how
        much this one may have: the machine has too little.
        """
        ticket = Ticket(need, self._size_for(need), holder, concurrent.futures.Future())
        if not self._is_granted(ticket):
            with self._lock:
                found = f"{self._inventory}, and {len(self._tickets.waiting)} calls wait"
                self.wait_count += 1
            _LOG.warning("the pool has run dry: %s", found)
            self._hurry()  # its next round may be half of idle_s away
        return ticket

    def request_at_once(self, need: Need, holder: object) -> Ticket | None:
        """Ask for a region, and wait for none: the ticket is granted, or there is none; raises as :meth:`request`."""
        ticket = Ticket(need, self._size_for(need), holder, concurrent.futures.Future())
        if self._is_granted(ticket):
            return ticket
        self.withdraw(ticket)
        return None

    def _is_granted(self, ticket: Ticket) -> bool:
        """Have a ticket wait its turn; return whether that has come at once."""
        with self._lock:
            if self._closed:
                raise ClosedError("this client")
            self._tickets.waiting.append(weakref.ref(ticket))
            self._serve()
        return ticket.granted.done()

    def redeem(self, ticket: Ticket, deadline: float = math.inf) -> tuple[SlotRegion, Memory]:
        """Return the region of a granted ticket, which may have to be made, and its memory.

        When the memory and every array made from it are gone, the region is given back. MachineError if the machine has
        not that much left; TimeoutError if it cannot be made by the deadline, of ``time.monotonic()``.
        """
        grant = ticket.granted.result()
        if isinstance(grant, Promise):
            region = self._make(ticket, grant, deadline)
        else:
            region = grant
            with self._lock:
                self._tickets.redeem(ticket)
        memory = self._hold(region, ticket.holder)
        if region is not grant and self.options.prefault:
            region.prefault(deadline)
        return region, memory

    def withdraw(self, ticket: Ticket) -> None:
        """Give up a ticket, granted or not; it cannot be redeemed then. Nothing happens if it was redeemed."""
        with self._lock:
            self._tickets.withdraw(ticket)
            self._serve()

    def exhausted(self, ticket: Ticket, waited_s: float) -> PoolExhaustedError:
        """Return the error for a ticket that was not granted in time."""
        with self._lock:
            found = str(self._inventory)
        return PoolExhaustedError(
            f"no {ticket.byte_size} bytes of shared memory became free within {waited_s:.3g} s: {found}. "
            "Release results sooner, or raise PoolOptions(max_bytes=...)"
        )

    def drop_idle(self) -> None:
        """Destroy every region that nobody holds."""
        with self._lock:
            self._inventory.sort_returned()
            self._inventory.destroy_idle()

    @property
    def stream_guess_bytes(self) -> int:
        """How much a stream may take for outputs whose size nobody knows yet."""
        return min(self.options.stream_guess_bytes, self._inventory.max_bytes // _PARTS_OF_THE_BUDGET)

    @property
    def status(self) -> PoolStatus:
        """What the pool has now."""
        self._look_at_budget()
        with self._lock:
            self._serve()
            return self._inventory.status()

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered regions that were destroyed since the last time: to be unregistered."""
        return self._inventory.take_unregistered()

    def close(self) -> None:
        """Remove all regions, and fail whoever waits. Arrays over them stay valid. Twice is fine.

        In a forked child it does nothing: the regions are the parent's.
        """
        if self.is_forked:
            return
        self._end(None)
        with self._lock:
            self._clear()

    def abandon(self) -> None:
        """Close it from a finalizer, which may have interrupted a locked section of its own thread: so not for long."""
        if not self.is_forked:
            self._end(_FINALIZERS_PATIENCE_S)

    def _end(self, patience_s: float | None) -> None:
        """Have the housekeeper, whom no signal interrupts, remove all regions, and end."""
        self._closed = True
        if self._housekeeper is not None:
            self._housekeeper.hurry()
            self._housekeeper.stop(patience_s)

    def forsake(self) -> None:
        """Forget every region, in a forked child. Arrays over them stay valid."""
        self.is_forked = True
        self._lock = threading.Lock()  # one of the parent's other threads may have held it, and does not run here
        self._inventory.forsake()
        self._tickets.waiting.clear()

    def _look_at_budget(self) -> None:
        """Have the budget follow what other processes leave of the machine's memory."""
        self._looked_at = self._inventory.byte_size
        self._inventory.max_bytes = self.options.budget_bytes(self._inventory.made_bytes)

    def _size_for(self, need: Need) -> int:
        more = abs(self._inventory.byte_size + need.byte_size - self._looked_at)
        if more > self._inventory.max_bytes // _PARTS_UNLOOKED:  # to look takes as long as to make a small region
            self._look_at_budget()
        try:
            return self._inventory.size_for(need)
        except BudgetError:
            is_system = need.kind is RegionKind.SYSTEM
            least, total = least_size(need), total_bytes() if is_system else memory_bytes()
            if least <= total and self.options.max_bytes is not None:
                raise
            larger_part = "raise PoolOptions(max_bytes=...), " if least <= total else ""
            raise NoSharedMemoryError(
                f"the call needs {least} bytes of shared memory, but {'/dev/shm' if is_system else 'the machine'} has "
                f"{total}, of which the pool may have {self._inventory.max_bytes}; "
                f"{MORE_ROOM if is_system else MORE_MEMORY}, {larger_part}or send less at once"
            ) from None

    def _make(self, ticket: Ticket, promise: Promise, deadline: float) -> SlotRegion:
        regions: list[SlotRegion] = []
        try:
            with self._lock:
                self._tickets.redeem(ticket)  # in here: from then on nobody else takes the promise back
            self._inventory.bury(promise.evicted)
            if promise.byte_size > ticket.byte_size:  # others get the rest
                with self._lock:
                    promise.byte_size = ticket.byte_size
                    self._serve()
            with self._lock:
                count = self._inventory.parts_for(ticket.need, promise)
            regions = self._make_regions(ticket, count, deadline)
            for region in regions:
                region.holder = ticket.holder
            with self._lock:
                if self._housekeeper is None:  # before any is there that only a housekeeper can end
                    self._housekeeper = Repeater(self._keep_house, self._patience(), "shm pool")
                if self._closed:  # whoever closed the pool may not have seen this housekeeper
                    self._housekeeper.stop_some_time()
                    raise ClosedError("this client")
                self._inventory.add(regions, ticket.need[1:], promise)
        except BaseException:
            with self._lock:
                self._inventory.undo(regions, promise)
                self._serve()
            raise
        if len(regions) > 1:
            self._share(regions[1:])
        return regions[0]

    def _share(self, regions: Sequence[SlotRegion]) -> None:
        """Let other calls have parts of a region that is there; an interrupt leaves some in nobody's hands."""
        for region in regions:
            region.holder = None
            self._inventory.put_back(region)
        with self._lock:
            self._serve()

    def _make_regions(self, ticket: Ticket, count: int, deadline: float) -> list[SlotRegion]:
        need, access = ticket.need, self.options.access
        data_size = ticket.byte_size - data_offset(need.slot_count, need.record_byte_size)
        make = functools.partial(SlotRegion, data_size, need.slot_count, need.record_byte_size, access, deadline)
        try:
            if count > 1:
                return make_parts(count, data_size, need.record_byte_size, access, deadline, need.kind)
            return [make(need.kind)]
        except MachineError:  # somebody else has taken the room; what lies idle here may be enough
            self.drop_idle()
        return [make(need.kind)]

    def _keep_house(self) -> float:
        """Look after what is in quarantine, and let go of what nobody has used for long."""
        with self._lock:
            self._serve()
        self._look_at_budget()
        with self._lock:
            self._inventory.destroy_idle(before=time.monotonic() - self.options.idle_s)
            held = [region for _, region in list(self._watched.values())]
            self._inventory.destroy_lost([*held, *self._tickets.granted.values()])
        is_urgent = self._tend is not None and self._tend()
        return _QUARANTINE_ROUND_S if is_urgent else self._patience()

    def _patience(self) -> float:
        is_urgent = self._inventory.quarantined or self._inventory.lost_since or self._tickets.waiting
        return _QUARANTINE_ROUND_S if is_urgent else max(self.options.idle_s / 2, _QUARANTINE_ROUND_S)
