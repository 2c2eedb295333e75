"""Which regions this process has mapped, and under which names.

Every region is mapped once, however many names it has: its device and inode identify it. A region that is unregistered
or abandoned while calls use it is unmapped after the last use. Memory under arrays stays mapped until the arrays are
gone.

A model keeps nothing else between requests. It finds a slot by its whole address: region, token and number. Every
request checks the file with ``fstat``.
"""

from __future__ import annotations

import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Final

from ...errors import MachineError, RegionGoneError, RegionRefusedError
from ...memory.descriptors import NoDescriptorsError
from ...memory.segment import MappedSegment
from ...memory.shared_file import SharedFile
from .mapped import MappedRegion, MappedSlot
from .memory import Pinning

__all__ = ["Registry"]

_RESERVE: Final = 64  # file descriptors that stay free for the model's other work
_LOOKS: Final = 16  # objects that one step checks for abandoned regions, in some 50 µs
_SHARE_DROPPED: Final = 4  # drop a quarter of the unused regions at once, not one at a time
_last_use: Final = attrgetter("last_use")


class Registry:
    """Maps regions under names, up to ``max_mapped_bytes``: the least recently used ones make room. Thread-safe."""

    def __init__(self, max_mapped_bytes: int | None = None, pinning: Pinning | None = None) -> None:
        self._max_mapped_bytes = max_mapped_bytes
        self._pinning = pinning  # for regions that get a name
        self._lock = threading.RLock()
        self.names: dict[str, MappedRegion] = {}  # code may read names and slots without the lock
        self._regions: weakref.WeakSet[MappedRegion] = weakref.WeakSet()  # all regions, also those that only calls hold
        # The named regions, by device and inode. The first ones were checked least recently.
        self._by_object: OrderedDict[tuple[object, ...], list[MappedRegion]] = OrderedDict()
        self.slots: dict[str, MappedSlot] = {}  # by address

    def obtain(self, name: str, opener: Callable[[], MappedRegion], field: str) -> MappedRegion:
        """Return the region of this name; if missing, open it with ``opener``, without blocking other names."""
        region = self.live(name, field)
        if region is None:
            self.drop_some_abandoned()  # abandoned regions make room for the new one now, not at the next sweep
            opened = self._open(opener)
            with self._lock:
                region = self.live(name, field) or self._add(name, opened)
        return region

    def hold(self, opener: Callable[[], MappedRegion]) -> MappedRegion:
        """Return an unnamed region from ``opener``: no other request finds it, and it is unmapped after its use."""
        self.drop_some_abandoned()  # as in :meth:`obtain`
        opened = self._open(opener)
        try:
            with self._lock:
                self._make_room(opened.segment.byte_size)
                self._regions.add(opened)
        except BaseException:
            opened.close_unused()
            raise
        return opened

    def live(self, name: str, field: str) -> MappedRegion | None:
        """Return the region of this name; None if it is missing, or must be reopened because its file has changed."""
        with self._lock:
            region = self.names.get(name)
            if region is not None:
                try:
                    region.segment.check(0, field)
                except (RegionGoneError, RegionRefusedError):
                    self.free_name(name)
                    return None
            return region

    def check_room(self, file: SharedFile) -> None:
        """Raise MachineError if dropping unused regions cannot make room for a file that is not mapped yet."""
        status = file.status
        with self._lock:
            alike = self._by_object.get((status.st_dev, status.st_ino), ())
            if all(region.segment.byte_size != status.st_size for region in alike):
                self._to_be_dropped(status.st_size)

    def add_slot(self, address: str, region: MappedRegion, number: int) -> MappedSlot:
        """Return a slot of a managed region, and keep the slot as long as the region has a name."""
        with self._lock:
            slot = MappedSlot(region, number)
            if region.names:
                region.addresses.append(address)
                self.slots[address] = slot
            return slot

    def free_name(self, name: str) -> None:
        """Free a name. The region is unmapped when it has no name and no use left. A free name is fine."""
        with self._lock:
            region = self.names.pop(name, None)
            if region is None:
                return
            region.names.discard(name)
            if not region.names:
                for address in region.addresses:
                    self.slots.pop(address, None)
                region.addresses.clear()
                alike = self._by_object[region.segment.identity]
                alike.remove(region)
                if not alike:
                    del self._by_object[region.segment.identity]

    def free_all_names(self) -> None:
        with self._lock:
            for name in list(self.names):
                self.free_name(name)

    def mapped(self) -> tuple[int, int]:
        with self._lock:
            regions = list(self._regions)
        return sum(region.segment.byte_size for region in regions), len(regions)

    def begin_use(self, region: MappedRegion) -> None:
        """Keep a region from making room for others until :meth:`end_use`."""
        with self._lock:
            region.use_count += 1
            region.last_use = time.monotonic()

    def end_use(self, region: MappedRegion) -> None:
        with self._lock:
            region.use_count -= 1

    def drop(self, region: MappedRegion) -> None:
        """Free every name of a region."""
        with self._lock:
            for name in list(region.names):
                self.free_name(name)

    def drop_abandoned(self) -> None:
        """Free the names of regions whose owners have unlinked them or have died."""
        for _ in range(0, len(self._by_object), _LOOKS):  # between these steps, requests can take the lock
            self.drop_some_abandoned()

    def drop_some_abandoned(self) -> None:
        """Do the same for the regions that were checked least recently: for as many as a request has time for."""
        with self._lock:
            for identity in list(islice(self._by_object, _LOOKS)):
                self._by_object.move_to_end(identity)
                for region in list(self._by_object[identity]):
                    if region.is_abandoned:
                        self.drop(region)

    def _open(self, opener: Callable[[], MappedRegion]) -> MappedRegion:
        try:
            opened = opener()
        except NoDescriptorsError:
            self._drop_oldest_idle()
            opened = opener()
        if _is_of_the_last_descriptors(opened):
            self._drop_oldest_idle()
        return opened

    def _add(self, name: str, opened: MappedRegion) -> MappedRegion:
        """Name and return an opened region, or an older mapping of the same object if its size and kind still fit."""
        segment = opened.segment
        alike = self._by_object.get(segment.identity, ())
        as_large = (each for each in alike if each.segment.byte_size == segment.byte_size)
        region = next((each for each in as_large if opened.managed is None or each.managed is not None), None)
        if region is not None:
            region.know_space_of(opened)  # pages of another part may have been allocated since
        else:
            self._make_room(segment.byte_size)
            region = opened
            if self._pinning is not None:
                region.pin(self._pinning)
            self._regions.add(region)
            self._by_object.setdefault(segment.identity, []).append(region)
        region.names.add(name)
        self.names[name] = region
        region.last_use = time.monotonic()
        return region

    def _drop_oldest_idle(self) -> None:
        """Unmap the unused regions that were used least recently, a quarter of them, to free file descriptors."""
        with self._lock:
            idle = sorted((region for region in list(self._regions) if not region.is_in_use), key=_last_use)
            for region in idle[: 1 + len(idle) // _SHARE_DROPPED]:
                self.drop(region)

    def _make_room(self, byte_size: int) -> None:
        for region in self._to_be_dropped(byte_size):
            self.drop(region)

    def _to_be_dropped(self, byte_size: int) -> list[MappedRegion]:
        """Return unused regions to drop so that ``byte_size`` bytes fit; MachineError if dropping all is not enough."""
        limit = self._max_mapped_bytes
        if limit is None:
            return []
        regions = list(self._regions)
        idle = sorted((region for region in regions if not region.is_in_use), key=_last_use)
        excess = sum(region.segment.byte_size for region in regions) + byte_size - limit
        dropped: list[MappedRegion] = []
        for region in idle:
            if excess <= 0:
                break
            dropped.append(region)
            excess -= region.segment.byte_size
        if excess > 0:
            raise MachineError(
                f"a region of {byte_size} bytes cannot be mapped: {excess + limit - byte_size} are mapped and in use, "
                f"and the limit (SHM_MAX_MAPPED_BYTES) is {limit}; raise it in the model's config.pbtxt, or use "
                "smaller regions"
            )
        return dropped


def _is_of_the_last_descriptors(opened: MappedRegion) -> bool:
    """Return whether few descriptors are left: a new one gets the lowest free number, so its number is high then."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # never RLIM_INFINITY, because fs.nr_open bounds it
    segment = opened.segment
    return isinstance(segment, MappedSegment) and segment.fileno() >= most - min(_RESERVE, most // 4)
