"""The slot pool: its regions come back by themselves, and waiting calls get one in the order of their arrival."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from ...errors import BudgetError, ClosedError, MachineError, NoSharedMemoryError, PoolExhaustedError
from ...process import call_after_fork
from ...protocol.layout import data_offset
from ..machine import MORE_MEMORY, memory_bytes
from ..managed import RegionKind, whole_pages
from ..repeater import Repeater
from ..shared_file import MORE_ROOM, total_bytes
from .inventory import FAR_MORE, SMALL, Inventory, Need, Waiter, least_size, region_size
from .options import PoolOptions, PoolStatus
from .slot import FREE, SPOILED, Memory, SlotRegion, make_parts

__all__ = ["SlotPool"]

_LOG: Final = logging.getLogger(__name__)
_QUARANTINE_ROUND_S: Final = 0.05
_FINALIZERS_PATIENCE_S: Final = 1.0
_CLOSES_S: Final = 2.0  # a signal handler that closes the client may have interrupted the code with the lock
_GUESSES_IN_THE_BUDGET: Final = 4
_PARTS_UNLOOKED: Final = 64


class SlotPool:
    """Keeps regions for reuse. Thread-safe, and first come, first served.

    A finalizer gives a region back when the last array over the region is gone: in any thread, even one that holds the
    pool's lock. So neither giving back nor taking an idle region takes a lock; finalizers leave other work to the
    housekeeper's thread. A region that a model may still use is in quarantine until the pool can reclaim it. In each
    round, the housekeeper also calls ``tend``, and begins the next round soon if ``tend`` returns True.
    """

    def __init__(self, options: PoolOptions, tend: Callable[[], bool] | None = None) -> None:
        self.options = options
        self.is_forked = False  # whether this is a forked child's copy of its parent's pool
        self.wait_count = 0  # how many calls had to wait
        self._inventory = Inventory(options.budget_bytes(0))
        self._looked_at = 0  # the bytes of all regions when the budget was last measured
        self._tend = tend
        self._lock = threading.Lock()
        self._waiting: deque[weakref.ref[Waiter]] = deque()  # checks for emptiness need no lock
        self._watched: dict[int, tuple[weakref.ref[Memory], SlotRegion]] = {}  # by the reference's id
        self._closed = False
        self._housekeeper: Repeater | None = None
        call_after_fork(self)

    def take_idle(self, need: Need, holder: object) -> tuple[SlotRegion, Memory] | None:
        """Return an idle region and its memory, without a lock; None if no idle region fits, or other calls wait."""
        if self._waiting:
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
                region.holder = holder  # _hold(), inlined, as every call comes here
                memory = np.frombuffer(region.buffer, np.uint8)
                reference = weakref.ref(memory, self._give_back)
                self._watched[id(reference)] = reference, region
                return region, memory
        return None

    def held(self) -> list[tuple[SlotRegion, Memory]]:
        """Return the regions that are in use, each with its memory."""
        watched = [(region, reference()) for reference, region in list(self._watched.values())]
        return [(region, memory) for region, memory in watched if memory is not None]

    def request(self, need: Need, holder: object) -> Waiter:
        """Ask for a region, now or in turn. BudgetError or NoSharedMemoryError if the pool can never make it."""
        waiter = self._queued(need, holder)
        if not waiter.granted.done():
            with self._lock:
                found = f"{self._inventory}, and {len(self._waiting)} calls wait"
                self.wait_count += 1
            _LOG.warning("the pool has run dry: %s", found)
            self._hurry()  # the housekeeper's next round may be half of idle_s away
        return waiter

    def request_at_once(self, need: Need, holder: object) -> Waiter | None:
        """Ask for a region without waiting; return a waiter that got one, or None. Raises as :meth:`request`."""
        waiter = self._queued(need, holder)
        if waiter.granted.done():
            return waiter
        self.withdraw(waiter)
        return None

    def take_granted(self, waiter: Waiter, deadline: float = math.inf) -> tuple[SlotRegion, Memory]:
        """Return the region granted to a waiter, made now if needed, and its memory; the memory's end gives it back."""
        region = waiter.granted.result()
        is_new = region is None
        if region is None:
            region = self._made(waiter, deadline)
        else:
            with self._lock:
                self._inventory.grant(waiter)
        memory = self._hold(region, waiter.holder)
        if is_new and self.options.prefault:
            region.prefault(deadline)
        return region, memory

    def grow(self, region: SlotRegion, end: int, deadline: float = math.inf) -> bool:
        """Enlarge a held region if there is room at once; return whether its data then reach ``end``."""
        with region.growing:
            more = whole_pages(end) - region.byte_size
            if more <= 0 or len(region.whole.slots) > 1:
                return end <= region.data_end
            self._look_at_budget()
            with self._lock:
                if self._closed:
                    raise ClosedError("this client")
                waiter = None if self._waiting else self._inventory.room_to_grow(region, more)
            if waiter is None:
                return False
            try:
                region.grow(end, deadline)
            except OSError:  # TimeoutError is one
                return False
            except BaseException:  # the interrupted growth may have changed only some copies of the token
                region.spoil("lost")
                raise
            finally:
                with self._lock:
                    self._inventory.have_grown(region, waiter)
                    self._serve()
        if self.options.prefault:
            region.prefault(deadline)
        return True

    def withdraw(self, waiter: Waiter) -> None:
        """Remove a waiter from the queue, and take back its granted region unless the waiter has taken the region."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._waiting.remove(weakref.ref(waiter))
            self._inventory.release(waiter)
            self._serve()

    def exhausted(self, waiter: Waiter, waited_s: float) -> PoolExhaustedError:
        """Return the error for a waiter that was granted nothing in time."""
        with self._lock:
            found = str(self._inventory)
        return PoolExhaustedError(
            f"no {waiter.byte_size} bytes of shared memory became free within {waited_s:.3g} s: {found}. "
            "Release results sooner, or raise PoolOptions(max_bytes=...)"
        )

    def drop_idle(self) -> None:
        """Destroy every region that no call holds."""
        with self._lock:
            self._inventory.sort_returned()
            self._inventory.destroy_idle()

    @property
    def stream_guess_bytes(self) -> int:
        """How many bytes a stream may take for outputs of yet unknown size."""
        return min(self.options.stream_guess_bytes, self._inventory.max_bytes // _GUESSES_IN_THE_BUDGET)

    @property
    def status(self) -> PoolStatus:
        """The pool's present numbers."""
        self._look_at_budget()
        with self._lock:
            self._serve()
            return self._inventory.status()

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered regions destroyed since the last call: the caller must unregister them."""
        return self._inventory.take_unregistered()

    def close(self) -> None:
        """Remove all regions, and fail waiting calls; no effect in a forked child. Arrays stay valid. Twice is fine."""
        if self.is_forked:
            return
        self._end(_CLOSES_S)
        if self._lock.acquire(timeout=_CLOSES_S):
            try:
                self._clear()
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """Close the pool from a finalizer, and wait only briefly: the finalizer's thread itself may hold the lock."""
        if not self.is_forked:
            self._end(_FINALIZERS_PATIENCE_S)

    def after_fork(self) -> None:
        """Forget every region, in a forked child. Arrays over them stay valid."""
        self.is_forked = True
        self._lock = threading.Lock()  # a thread of the parent may have held the old one, and does not run here
        self._inventory.after_fork()
        self._waiting.clear()

    def _end(self, patience_s: float) -> None:
        """Let the housekeeper's thread, which no signal interrupts, remove all regions and end."""
        self._closed = True
        if self._housekeeper is not None:
            self._housekeeper.hurry()
            self._housekeeper.stop(patience_s)

    def _clear(self) -> None:
        self._inventory.destroy_all()
        for reference in self._waiting:
            waiter = reference()
            if waiter is not None and waiter.granted.set_running_or_notify_cancel():
                waiter.granted.set_exception(ClosedError("this client"))
        self._waiting.clear()

    def _hold(self, region: SlotRegion, holder: object) -> Memory:
        region.holder = holder
        memory = np.frombuffer(region.buffer, np.uint8)
        reference = weakref.ref(memory, self._give_back)
        self._watched[id(reference)] = reference, region
        return memory

    def _give_back(self, memory: weakref.ref[Memory]) -> None:
        # Python ignores exceptions raised here, even interrupts. So one line both stops watching the region and puts it
        # in its place: after an earlier interrupt, :meth:`_find_dropped` still finds it among the watched regions.
        number = id(memory)
        watched = self._watched.get(number)
        if watched is None:
            return  # an interrupt came before the region was watched: destroy_lost() will find the region
        if self._closed:
            self._watched.pop(number, None)
            return
        region = watched[1]
        region.holder = None
        is_ready = not region.borrowed
        for slot in region.slots:  # the region's state, inlined, as every call comes here
            is_ready = is_ready and slot.state == FREE
        place = region.shelf if is_ready else self._inventory.returned
        assert place is not None
        region.idle_since = time.monotonic()
        try:
            place.append(self._watched.pop(number)[1])
        except KeyError:
            return  # :meth:`_find_dropped` found the region before
        if self._waiting or not is_ready:
            self._hurry()

    def _find_dropped(self) -> None:
        """Take back regions whose finalizer was interrupted before it gave them back."""
        for number, (reference, region) in self._watched.copy().items():  # a copy, as finalizers change it
            if reference() is None:
                region.holder = None
                with contextlib.suppress(KeyError):  # the finalizer gave the region back meanwhile
                    self._inventory.returned.append(self._watched.pop(number)[1])

    def _hurry(self) -> None:
        if self._housekeeper is not None:
            self._housekeeper.hurry()

    def _queued(self, need: Need, holder: object) -> Waiter:
        """Put a new waiter into the queue, serve the queue, and return the waiter."""
        waiter = Waiter(need, self._size_for(need), holder)
        with self._lock:
            if self._closed:
                raise ClosedError("this client")
            self._waiting.append(weakref.ref(waiter))
            self._serve()
        return waiter

    def _serve(self) -> None:
        """Sort returned regions and serve waiters in order, or clear a closed pool; the caller must hold the lock."""
        self._find_dropped()
        self._inventory.sort_returned()
        if self._closed:
            self._clear()
        while self._waiting:
            waiter = self._waiting[0]()
            if waiter is not None and not self._inventory.reserve(waiter):
                return
            self._waiting.popleft()  # last: after an error, the waiter is still in the queue
            if waiter is None:
                continue
            if waiter.granted.set_running_or_notify_cancel():
                waiter.granted.set_result(waiter.region)
            else:
                self._inventory.release(waiter)

    def _look_at_budget(self) -> None:
        """Adjust the budget to the memory that other processes leave free."""
        self._looked_at = self._inventory.byte_size
        self._inventory.max_bytes = self.options.budget_bytes(self._inventory.made_bytes)

    def _size_for(self, need: Need) -> int:
        """Return the size of a region for a call, with room for slightly larger calls if the budget allows it."""
        more = abs(self._inventory.byte_size + need.byte_size - self._looked_at)
        if more > self._inventory.max_bytes // _PARTS_UNLOOKED:  # measuring takes as long as making a small region
            self._look_at_budget()
        most, larger, least = self._inventory.max_bytes, region_size(need), least_size(need)
        if least <= most:
            return larger if larger <= most else least
        is_system = need.kind is RegionKind.SYSTEM
        total = total_bytes() if is_system else memory_bytes()
        if least <= total and self.options.max_bytes is not None:
            raise BudgetError(
                f"the call needs {least} bytes of shared memory, but the pool may have {most}; raise "
                "PoolOptions(max_bytes=...), or send less at once"
            )
        larger_part = "raise PoolOptions(max_bytes=...), " if least <= total else ""
        raise NoSharedMemoryError(
            f"the call needs {least} bytes of shared memory, but {'/dev/shm' if is_system else 'the machine'} has "
            f"{total}, of which the pool may have {most}; "
            f"{MORE_ROOM if is_system else MORE_MEMORY}, {larger_part}or send less at once"
        )

    def _made(self, waiter: Waiter, deadline: float) -> SlotRegion:
        regions: list[SlotRegion] = []
        try:
            with self._lock:
                self._inventory.grant(waiter)  # inside this block: from now on, only this call releases the room
            regions = self._make_regions(waiter, deadline)
            for region in regions:
                region.holder = waiter.holder
            with self._lock:
                if self._housekeeper is None:  # before the first region: only a housekeeper can destroy it later
                    self._housekeeper = Repeater(self._keep_house, self._pause_s(), "shm pool")
                if self._closed:  # close() may not have seen this housekeeper
                    self._housekeeper.stop_some_time()
                    raise ClosedError("this client")
                self._inventory.add(regions, waiter)
        except BaseException:
            with self._lock:
                self._inventory.undo(regions, waiter)
                self._serve()
            raise
        for region in regions[1:]:  # for other calls; after an interrupt, destroy_lost() finds the rest
            region.holder = None
            self._inventory.put_back(region)
        if regions[1:]:
            with self._lock:
                self._serve()
        return regions[0]

    def _make_regions(self, waiter: Waiter, deadline: float) -> list[SlotRegion]:
        need, access = waiter.need, self.options.access
        data_size = waiter.byte_size - data_offset(need.slot_count, need.record_byte_size)
        make = functools.partial(SlotRegion, data_size, need.slot_count, need.record_byte_size, access, deadline)
        try:
            if waiter.count > 1:
                return make_parts(waiter.count, data_size, need.record_byte_size, access, deadline, need.kind)
            return [make(need.kind)]
        except MachineError:  # another process has taken the room; dropping idle regions may free enough
            self.drop_idle()
        return [make(need.kind)]

    def _keep_house(self) -> float:
        """Measure the budget, serve waiters, destroy lost and long idle regions, and return the seconds to wait."""
        self._look_at_budget()
        with self._lock:
            self._serve()
            self._inventory.destroy_idle(before=time.monotonic() - self.options.idle_s)
            self._inventory.destroy_lost([region for _, region in list(self._watched.values())])
        is_urgent = self._tend is not None and self._tend()
        return _QUARANTINE_ROUND_S if is_urgent else self._pause_s()

    def _pause_s(self) -> float:
        is_urgent = self._inventory.quarantined or self._inventory.lost_since or self._waiting
        return _QUARANTINE_ROUND_S if is_urgent else max(self.options.idle_s / 2, _QUARANTINE_ROUND_S)
