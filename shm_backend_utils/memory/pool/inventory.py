"""The regions of a pool, their states, and the waiters that they are reserved for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...errors import ClosedError
from ...protocol.layout import PAGE_SIZE, data_offset
from ..managed import RegionKind, roomy, whole_pages
from .options import PoolStatus
from .slot import FREE, SPOILED, Parts, SlotRegion

__all__ = [
    "DIRECT",
    "FAR_MORE",
    "PREPARED",
    "SMALL",
    "Inventory",
    "Kind",
    "Need",
    "Waiter",
    "least_size",
    "region_size",
]

Kind = tuple[int, int, str, RegionKind]
"""The common properties of interchangeable regions: slot count, record size, group, kind of memory."""

_LEAST_PARTS: Final = 8  # so regions have parts only from the fifth concurrent call on
_MOST_PARTS: Final = 256
_MOST_BYTES_OF_PARTS: Final = 16 * 2**20
_PARTS_OF_THE_BUDGET: Final = 64  # a region with parts takes at most 1/64 of it, as one used part keeps all parts
_LOST_S: Final = 5.0  # a region that moves to or from a shelf has no holder for a moment


FAR_MORE: Final = 16
"""A call takes no idle region that is larger than ``SMALL`` and also larger than this many times the call's need."""

SMALL: Final = 2**20

DIRECT: Final = "direct"
"""The group of regions for calls on the direct path that need nothing but memory on the host."""

PREPARED: Final = "direct, prepared"
"""The group of regions for prepared calls: each call has a region of its own, which may grow."""


class Need(NamedTuple):
    """A call's requirements for a region. A call never takes a region of another group or kind."""

    byte_size: int  # of data
    slot_count: int = 1
    record_byte_size: int = PAGE_SIZE  # of each slot's record
    group: str = DIRECT
    kind: RegionKind = RegionKind.SYSTEM


def region_size(need: Need) -> int:
    """Return the size of the region that a pool makes for a need, with room for slightly larger calls."""
    data = roomy(max(need.byte_size, 1), PAGE_SIZE)
    return data + data_offset(need.slot_count, need.record_byte_size)


def least_size(need: Need) -> int:
    """Return the size of the smallest region that meets a need."""
    return whole_pages(max(need.byte_size, 1) + data_offset(need.slot_count, need.record_byte_size))


@dataclass(eq=False)
class Waiter:
    """A call that waits for a region, or has one reserved. Only the call keeps its waiter, so both end together."""

    need: Need
    byte_size: int  # of a new region, for each of its parts
    holder: object  # the object that asks for the region; messages show its text
    region: SlotRegion | None = None  # the reserved idle region; None if room for a new one is reserved
    count: int = 1  # how many parts a new region gets
    is_making: bool = False  # whether the call makes a region in its reserved room
    granted: concurrent.futures.Future[SlotRegion | None] = field(default_factory=concurrent.futures.Future)


class Shelf(NamedTuple):
    """Idle regions of one capacity. Calls take the last used one, at the right: CPU caches may still hold it."""

    capacity: int
    regions: deque[SlotRegion]


class Inventory:
    """Regions up to a budget. ``put_back`` and taking from a shelf need no lock; all else needs the pool's lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # the budget, as the pool last measured it
        self.returned: deque[SlotRegion] = deque()  # given back, but not yet sorted; needs no lock
        self.quarantined: list[SlotRegion] = []  # given back, but a model may still be executing there
        self._kinds: dict[SlotRegion, Kind] = {}  # every region
        # The idle regions of each kind, smallest first. Readers take no lock, so a tuple is replaced, never changed.
        self.shelves: dict[Kind, tuple[Shelf, ...]] = {}
        self.lost_since: dict[SlotRegion, float] = {}  # regions without a holder, by time.monotonic()
        # Each waiter's reserved region, or None for room, until the waiter takes it; released if the waiter is gone.
        self._reserved: dict[weakref.ref[Waiter], SlotRegion | None] = {}
        self._unregistered: deque[str] = deque()

    def reserve(self, waiter: Waiter) -> bool:
        """Reserve an idle region for a waiter, or room for a new one; return False if there is neither."""
        reference, need = weakref.ref(waiter), waiter.need
        if reference in self._reserved:  # an interrupt came before the waiter left the queue
            return True
        waiter.region = self.take(need.byte_size, need[1:])
        if waiter.region is None:
            return self._make_room(waiter)
        waiter.region.holder = waiter.holder
        self._reserved[reference] = waiter.region
        return True

    def grant(self, waiter: Waiter) -> None:
        """Let a waiter take its reserved region or room; ClosedError if the reservation is gone."""
        reference = weakref.ref(waiter)
        if waiter.is_making or reference not in self._reserved:
            raise ClosedError("this client")
        if waiter.region is None:
            waiter.is_making = True
        else:
            del self._reserved[reference]

    def release(self, waiter: Waiter) -> None:
        """Take back the region reserved for a waiter, unless the waiter has taken it."""
        if not waiter.is_making:
            self._release(weakref.ref(waiter))

    def _release(self, reference: weakref.ref[Waiter]) -> None:
        region = self._reserved.pop(reference, None)
        if region is not None:
            region.holder = None
            self.returned.append(region)

    def take(self, byte_size: int, kind: Kind) -> SlotRegion | None:
        """Take the smallest idle region of a kind that is large enough, and not far too large; None if none fits."""
        most = max(FAR_MORE * byte_size, SMALL)
        for capacity, regions in self.shelves.get(kind, ()):
            if byte_size <= capacity <= most:
                with contextlib.suppress(IndexError):
                    while (region := regions.pop()).slots[0].state == SPOILED:
                        self.returned.append(region)
                    return region
        return None

    def put_back(self, region: SlotRegion) -> None:
        """Put a region on its shelf, now that no call holds the region and no model uses it."""
        region.idle_since = time.monotonic()
        assert region.shelf is not None
        region.shelf.append(region)

    def add(self, regions: Sequence[SlotRegion], waiter: Waiter) -> None:
        """Add new regions, which their waiter holds, and end the reservation of its room."""
        for region in regions:
            self._add(region, waiter.need[1:])
        self._reserved.pop(weakref.ref(waiter), None)

    def undo(self, regions: Iterable[SlotRegion], waiter: Waiter) -> None:
        """Destroy the regions that were made for a waiter, added or not, and release its room."""
        for region in regions:
            if region in self._kinds:
                self.destroy(region)
            else:
                self._unlink(region)
        self._reserved.pop(weakref.ref(waiter), None)

    def _add(self, region: SlotRegion, kind: Kind) -> None:
        shelf = next((shelf for shelf in self.shelves.get(kind, ()) if shelf.capacity == region.capacity), None)
        if shelf is None:
            shelf = Shelf(region.capacity, deque())
            self._drop_unused_shelves()
            self.shelves[kind] = tuple(sorted((*self.shelves.get(kind, ()), shelf), key=lambda each: each.capacity))
        region.shelf = shelf.regions
        self._kinds[region] = kind

    def room_to_grow(self, region: SlotRegion, byte_size: int) -> Waiter | None:
        """Reserve room for a region to grow, until :meth:`have_grown`; return the room's waiter, None without room."""
        waiter = Waiter(Need(byte_size, *self._kinds[region]), byte_size, region.holder)
        return waiter if self._make_room(waiter) else None

    def have_grown(self, region: SlotRegion, waiter: Waiter) -> None:
        """End a region's growth, successful or not; destroy the region if the pool was closed meanwhile."""
        self._reserved.pop(weakref.ref(waiter), None)
        if region in self._kinds:
            self._add(region, self._kinds[region])
        else:
            region.destroy()

    def _make_room(self, waiter: Waiter) -> bool:
        """Reserve room for a new region, if needed by destroying idle ones: first a smaller one of its kind."""
        kind, size, idle = waiter.need[1:], waiter.byte_size, self._unused()
        if self.max_bytes - self.byte_size + sum(parts[0].byte_size for parts in idle) < size:
            return False
        has_made_way = False  # one smaller region of the kind goes even if there is room: calls have outgrown it
        for parts in sorted(idle, key=lambda each: self._kinds[each[0]] != kind):
            is_too_small_a_one = self._kinds[parts[0]] == kind and parts[0].byte_size < size and not has_made_way
            if self.byte_size + size <= self.max_bytes and not is_too_small_a_one:
                break
            for region in filter(self._take_off, parts):
                self.destroy(region)
                has_made_way = True
        if self.byte_size + size > self.max_bytes:  # another call has taken an idle region meanwhile
            return False
        waiter.count = self._parts_for(waiter)
        self._reserved[weakref.ref(waiter)] = None
        return True

    def _parts_for(self, waiter: Waiter) -> int:
        """Return how many parts a waiter's new region should have: two for each held region of its kind."""
        kind, need = waiter.need[1:], waiter.need
        if need.group != DIRECT or need.slot_count > 1:
            return 1
        held = sum([region.holder is not None for region, its_kind in self._kinds.items() if its_kind == kind])
        most_bytes = min(_MOST_BYTES_OF_PARTS, self.max_bytes // _PARTS_OF_THE_BUDGET, self.max_bytes - self.byte_size)
        count = min(2 * held, _MOST_PARTS, most_bytes // waiter.byte_size)
        return 1 if count < _LEAST_PARTS else count

    def sort_returned(self) -> None:
        """Shelve or quarantine returned regions, retry those in quarantine, and release lost waiters' reservations."""
        while self.returned:
            region = self.returned.popleft()
            if region not in self._kinds:
                continue  # the pool was closed meanwhile
            if region.state == FREE and not region.borrowed:
                self.put_back(region)
            else:
                self.quarantined.append(region)  # before any attempt to reclaim it, so that no error loses it
        for region in list(self.quarantined):
            self._retry(region)
        for reference in list(self._reserved):
            if reference() is None:
                self._release(reference)

    @property
    def byte_size(self) -> int:
        """The bytes of all regions, made or reserved, counted each time: reservations of lost waiters do not count."""
        to_make = [reference() for reference, region in list(self._reserved.items()) if region is None]
        return self.made_bytes + sum([each.count * each.byte_size for each in to_make if each is not None])

    @property
    def made_bytes(self) -> int:
        """The bytes of all regions that exist."""
        return sum({region.whole: region.byte_size for region in list(self._kinds)}.values())

    @property
    def idle(self) -> list[SlotRegion]:
        """The regions that no call holds and no model uses."""
        quarantined = set(self.quarantined)
        return [region for region in self._kinds if region.holder is None and region not in quarantined]

    def destroy_idle(self, before: float = float("inf")) -> None:
        """Destroy the regions that became idle before the moment ``before``, by ``time.monotonic()``."""
        for parts in self._unused():
            if parts[-1].idle_since < before:
                for region in filter(self._take_off, parts):
                    self.destroy(region)

    def _unused(self) -> list[list[SlotRegion]]:
        """Return the parts of each region whose parts are all idle, longest idle first: only these can free memory."""
        found: dict[Parts, list[SlotRegion]] = {}
        for region in sorted(self.idle, key=lambda each: each.idle_since):
            found.setdefault(region.whole, []).append(region)
        return [parts for whole, parts in found.items() if len(parts) == len(whole.parts)]

    def destroy_lost(self, held: Iterable[object]) -> None:
        """Destroy regions that an interrupt left without a holder for seconds; a moment without a holder is normal."""
        now = time.monotonic()
        kept = {*held, *self.returned, *self.quarantined, *self._reserved.values()}
        for shelf in itertools.chain(*self.shelves.values()):
            kept.update(list(shelf.regions))
        lost = [region for region in self._kinds if region not in kept]
        self.lost_since = {region: self.lost_since.get(region, now) for region in lost}
        for region, since in list(self.lost_since.items()):
            if now - since > _LOST_S:
                self.destroy(region)

    def destroy_all(self) -> None:
        """Destroy every region, and cancel all reservations."""
        self.shelves = {}
        self._reserved.clear()
        for region in list(self._kinds):
            self.destroy(region)

    def destroy(self, region: SlotRegion) -> None:
        """Remove a region and its name. If an interrupt stops this, another call finishes the work."""
        self._unlink(region)
        region.whole.parts.discard(region.slots[0].index)
        if region in self.quarantined:
            self.quarantined.remove(region)
        del self._kinds[region]

    def _unlink(self, region: SlotRegion) -> None:
        """Remove a region's name before the region is unregistered: a server that registers it later finds nothing."""
        region.destroy()
        if region.is_registered:
            self._unregistered.append(region.key)
            region.is_registered = False  # after an interrupt here, the next call does it all again

    def after_fork(self) -> None:
        """Forget every region in a forked child: all regions belong to the parent."""
        regions = list(self._kinds)
        self._kinds.clear()  # first: regions that are given back meanwhile are then ignored
        self.shelves.clear()
        self.quarantined.clear()
        for region in regions:
            region.after_fork()

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered regions destroyed since the last call: the caller must unregister them."""
        keys = []
        with contextlib.suppress(IndexError):  # other threads take some, too
            while True:
                keys.append(self._unregistered.popleft())
        return keys

    def status(self) -> PoolStatus:
        """Return how many regions are in which state, and their bytes."""
        idle, quarantined = len(self.idle), len(self.quarantined)
        return PoolStatus(len(self._kinds) - idle - quarantined, idle, quarantined, self.byte_size, self.max_bytes)

    def __str__(self) -> str:
        holders = Counter(str(region.holder) for region in self._kinds if region.holder is not None)
        by_whom = "; ".join(f"{count} by {holder}" for holder, count in holders.most_common(5))
        return (
            f"{sum(holders.values())} slots are held, {self.byte_size} of {self.max_bytes} bytes"
            f"{': ' if by_whom else ''}{by_whom}; {len(self.quarantined)} more are in quarantine"
        )

    def _retry(self, region: SlotRegion) -> None:
        """Let a region out of quarantine if it can be reclaimed."""
        with contextlib.suppress(OSError):  # the kernel is out of locks; it may have one later
            if not region.reclaim():
                return
            if region.is_spent:
                self.destroy(region)
            else:
                self.quarantined.remove(region)
                self.put_back(region)

    def _take_off(self, region: SlotRegion) -> bool:
        """Take an idle region off its shelf; return False if a call has taken the region meanwhile."""
        assert region.shelf is not None
        try:
            region.shelf.remove(region)
        except ValueError:
            return False
        return True

    def _drop_unused_shelves(self) -> None:
        used = {(kind, region.capacity) for region, kind in self._kinds.items()}
        self.shelves = {
            kind: kept
            for kind, shelves in self.shelves.items()
            if (kept := tuple([shelf for shelf in shelves if (kind, shelf.capacity) in used]))
        }
