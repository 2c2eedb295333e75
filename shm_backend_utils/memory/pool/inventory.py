"""Which regions a pool has, and in what state each is."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...errors import BudgetError
from .need import DIRECT, FAR_MORE, SMALL, Need, least_size, region_size
from .options import PoolStatus
from .slot import SlotRegion, Whole
from .states import SPOILED

__all__ = ["Inventory", "Kind", "Promise", "Shelf"]

Kind = tuple[object, ...]
"""What regions must have in common to be exchanged: slots, records, group."""

_LEAST_PARTS: Final = 8  # from the fifth call on
_MOST_PARTS: Final = 256
_MOST_BYTES_OF_PARTS: Final = 16 * 2**20
_PARTS_OF_THE_BUDGET: Final = 64  # one part in use keeps all of its region
_LOST_S: Final = 5.0  # a region on its way to or from a shelf is in nobody's hands for a moment


class Shelf(NamedTuple):
    """Idle regions of one capacity; the one used last at the right, as the processor's caches still have some of it."""

    capacity: int
    regions: deque[SlotRegion]


@dataclass(eq=False)
class Promise:
    """Room for a new region: a part of the budget that the evicted regions have until they are destroyed, or more."""

    byte_size: int
    evicted: list[SlotRegion]


class Inventory:
    """Regions up to a budget. Putting back, and taking from a shelf, need no lock; for all else a pool adds one."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # the budget, as it was looked at last
        self.returned: deque[SlotRegion] = deque()  # given back, and not looked at yet; needs no lock
        self.quarantined: list[SlotRegion] = []  # given back, but a model may still be executing there
        self._kinds: dict[SlotRegion, Kind] = {}  # every region
        # The idle regions of each kind, smallest first; a tuple is replaced, never changed.
        self.shelves: dict[Kind, tuple[Shelf, ...]] = {}
        self.lost_since: dict[SlotRegion, float] = {}  # in nobody's hands at the last look, by time.monotonic()
        self._promises: list[weakref.ref[Promise]] = []  # replaced, never changed
        self._unregistered: deque[str] = deque()

    def size_for(self, need: Need) -> int:
        """Return the size of a region for a call, with room for similar calls where the budget has it.

        BudgetError if it has not even enough for the call.
        """
        larger = region_size(need)
        if larger <= self.max_bytes:
            return larger
        least = least_size(need)
        if least > self.max_bytes:
            raise BudgetError(
                f"the call needs {least} bytes of shared memory, but the pool may have "
                f"{self.max_bytes}; raise PoolOptions(max_bytes=...), or send less at once"
            )
        return least

    def take(self, byte_size: int, kind: Kind) -> SlotRegion | None:
        """Take the smallest idle region of a kind that has room, and not far too much; None if there is none."""
        most = max(FAR_MORE * byte_size, SMALL)
        for capacity, regions in self.shelves.get(kind, ()):
            if byte_size <= capacity <= most:
                with contextlib.suppress(IndexError):
                    while (region := regions.pop()).slots[0].state == SPOILED:
                        self.returned.append(region)
                    return region
        return None

    def put_back(self, region: SlotRegion) -> None:
        """Make a region idle that nobody holds and no model uses."""
        region.idle_since = time.monotonic()
        assert region.shelf is not None
        region.shelf.append(region)

    def parts_for(self, need: Need, promise: Promise) -> int:
        """Return how many parts to make of a promised region, two for each that is held; the promise grows with them.

        So calls that come at once make few regions, and a lone call does not pay for others.
        """
        kind, size = need[1:], promise.byte_size
        if need.group != DIRECT or need.slot_count > 1:
            return 1
        held = sum([region.holder is not None for region, its_kind in self._kinds.items() if its_kind == kind])
        most_bytes = min(_MOST_BYTES_OF_PARTS, self.max_bytes // _PARTS_OF_THE_BUDGET, self.max_bytes - self.byte_size)
        count = min(2 * held, _MOST_PARTS, most_bytes // size)
        if count < _LEAST_PARTS:
            return 1
        promise.byte_size = count * size
        return count

    def add(self, regions: Sequence[SlotRegion], kind: Kind, promise: Promise) -> None:
        """Add new regions, which are held. Their size is what was promised, and the promise is used up."""
        for region in regions:
            self._add(region, kind)
        promise.byte_size = 0

    def _add(self, region: SlotRegion, kind: Kind) -> None:
        shelf = next((shelf for shelf in self.shelves.get(kind, ()) if shelf.capacity == region.capacity), None)
        if shelf is None:
            shelf = Shelf(region.capacity, deque())
            self._drop_unused_shelves()
            self.shelves[kind] = tuple(sorted((*self.shelves.get(kind, ()), shelf), key=lambda each: each.capacity))
        region.shelf = shelf.regions
        self._kinds[region] = kind

    def promise(self, byte_size: int, kind: Kind) -> Promise | None:
        """Make room for a new region, for which others may have to be destroyed; None if there cannot be enough.

        An idle one of the same kind, which was too small, makes room first: so calls that grow leave none behind.
        """
        idle = self._unused()
        free = self.max_bytes - self.byte_size
        if free + sum(parts[0].byte_size for parts in idle) < byte_size:
            return None
        promise = Promise(0, [])
        self._promises = [*filter(_is_alive, self._promises), weakref.ref(promise)]
        for parts in sorted(idle, key=lambda each: self._kinds[each[0]] != kind):
            region = parts[0]
            is_too_small_a_one = self._kinds[region] == kind and region.byte_size < byte_size and not promise.evicted
            if byte_size <= free and not is_too_small_a_one:
                break
            taken = [each for each in parts if self._take_off(each)]
            promise.evicted += taken
            for each in taken:
                self._forget(each)
            if not region.whole.parts:
                promise.byte_size += region.byte_size
                free += region.byte_size
        if byte_size > free:  # somebody has taken one meanwhile
            self.bury(promise.evicted)
            return None
        promise.byte_size = max(byte_size, promise.byte_size)
        return promise

    def unpromise(self, promise: Promise) -> None:
        """Take back a promise. Nothing happens if it was used up, or taken back before."""
        self.bury(promise.evicted)
        promise.byte_size = 0

    def undo(self, regions: Iterable[SlotRegion], promise: Promise) -> None:
        """Take back a promise, and the regions that were made of it, if some were."""
        for region in regions:
            if region in self._kinds:
                self.destroy(region)
            else:
                self.bury([region])
        self.unpromise(promise)

    def sort_returned(self) -> None:
        """Destroy, reclaim, or put into quarantine what was given back; look again at what is there."""
        while self.returned:
            self._care_for(self.returned.popleft())
        for region in list(self.quarantined):
            self._retry(region)

    @property
    def byte_size(self) -> int:
        """Of all regions; also those that are promised but not made yet, and those that make way until they are gone.

        It is counted each time, and so forgets a promise that nobody has any more.
        """
        promises = [promise for reference in self._promises if (promise := reference()) is not None]
        return self.made_bytes + sum([promise.byte_size for promise in promises])

    @property
    def made_bytes(self) -> int:
        """Of all regions that there are."""
        return sum({region.whole: region.byte_size for region in list(self._kinds)}.values())

    @property
    def idle(self) -> list[SlotRegion]:
        """The regions that nobody holds and no model uses."""
        quarantined = set(self.quarantined)
        return [region for region in self._kinds if region.holder is None and region not in quarantined]

    def destroy_idle(self, before: float = float("inf")) -> None:
        """Destroy the regions that have been idle since before a moment."""
        for parts in self._unused():
            if parts[-1].idle_since < before:
                for region in filter(self._take_off, parts):
                    self.destroy(region)

    def _unused(self) -> list[list[SlotRegion]]:
        """Return the regions of which no part is in use, as their parts, the oldest first: these alone give memory."""
        found: dict[Whole, list[SlotRegion]] = {}
        for region in sorted(self.idle, key=lambda each: each.idle_since):
            found.setdefault(region.whole, []).append(region)
        return [parts for whole, parts in found.items() if len(parts) == len(whole.parts)]

    def destroy_lost(self, held: Iterable[object]) -> None:
        """Destroy the regions that an interrupt has left in nobody's hands, on their way to or from a shelf.

        They are so for a moment without one, too. So it takes seconds until one counts as lost.
        """
        now = time.monotonic()
        kept = {*held, *self.returned, *self.quarantined}
        for shelf in itertools.chain(*self.shelves.values()):
            kept.update(list(shelf.regions))
        lost = [region for region in self._kinds if region not in kept]
        self.lost_since = {region: self.lost_since.get(region, now) for region in lost}
        for region, since in list(self.lost_since.items()):
            if now - since > _LOST_S:
                self.destroy(region)

    def destroy_all(self) -> None:
        """Destroy every region, and leave none on a shelf."""
        self.shelves = {}
        for region in list(self._kinds):
            self.destroy(region)

    def destroy(self, region: SlotRegion) -> None:
        """Remove a region, and its name; again, if that was interrupted."""
        self.bury([region])
        self._forget(region)

    def bury(self, forgotten: Iterable[SlotRegion]) -> None:
        """Remove the names of regions that were forgotten already. Needs no lock.

        A region's name goes before it is unregistered: what the server registers later than that, it cannot find.
        """
        for region in forgotten:
            region.destroy()
            if region.is_registered:
                self._unregistered.append(region.key)
                region.is_registered = False  # who is interrupted here does it all again

    def forsake(self) -> None:
        """Forget every region, in a forked child: they are the parent's."""
        regions = list(self._kinds)
        self._kinds.clear()  # first: what is given back meanwhile is not looked after here
        self.shelves.clear()
        self.quarantined.clear()
        for region in regions:
            region.forsake()

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered regions that were destroyed since the last time: to be unregistered."""
        keys = []
        while self._unregistered:
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

    def _care_for(self, region: SlotRegion) -> None:
        """Sort a region that is no longer held by what can be done with it now."""
        if region not in self._kinds:
            return  # the pool was closed meanwhile
        if region.is_reusable:
            self.put_back(region)
        else:
            self.quarantined.append(region)  # first: whatever is raised, somebody looks at it again
            self._retry(region)

    def _retry(self, region: SlotRegion) -> None:
        """Let a region out of quarantine, if that can be."""
        with contextlib.suppress(OSError):  # the kernel has no lock to give: it may have one later
            if not region.reclaim():
                return
            if region.is_to_go:
                self.destroy(region)
            else:
                self.quarantined.remove(region)
                self.put_back(region)

    def _take_off(self, region: SlotRegion) -> bool:
        """Take an idle region off its shelf; return whether it was there, and not taken meanwhile."""
        assert region.shelf is not None
        try:
            region.shelf.remove(region)
        except ValueError:
            return False
        return True

    def _forget(self, region: SlotRegion) -> None:
        region.whole.parts.discard(region.slots[0].index)
        if region in self.quarantined:
            self.quarantined.remove(region)
        del self._kinds[region]

    def _drop_unused_shelves(self) -> None:
        used = {(kind, region.capacity) for region, kind in self._kinds.items()}
        self.shelves = {
            kind: kept
            for kind, shelves in self.shelves.items()
            if (kept := tuple([shelf for shelf in shelves if (kind, shelf.capacity) in used]))
        }


def _is_alive(reference: weakref.ref[Promise]) -> bool:
    return reference() is not None
