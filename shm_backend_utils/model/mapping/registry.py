"""SharedMemoryManager: which regions this process has mapped, and under which names.

A registry with the semantics of the server's class of the same name (``shared_memory_manager.cc``), but for mappings in
this process. The session behind ``ShmSession`` uses it; it can be used alone.

Every region is mapped once, however many names it has: what counts is the object (device and inode), not what it is
called. A region that is unregistered, or that its owner has left, while a call uses it goes when its last use ends.
What arrays still need stays mapped until they are gone, which nobody can prevent.

This is all that a model remembers of requests. A slot is found by its whole address, which names region, token and
number; what is found is checked with ``fstat`` for every request.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import CallerError, MachineError, RegionGoneError, RegionRefusedError
from ...memory.cuda.memory import CudaAccess
from ...memory.descriptors import NoDescriptorsError
from ...memory.segment import SystemSegment
from ...tensors.attributes import BufferAttributes
from .mapped import MappedRegion, Slot

__all__ = ["MemoryInfo", "RegionStatus", "SharedMemoryManager"]

_MAX_INT64: Final = 2**63 - 1
_SHARE_DROPPED: Final = 4  # of the regions that nobody uses, where there are too many: not one at a time


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What is registered under a name."""

    name: str
    key: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """A part of a region: ``memory`` is a writable array of uint8, NumPy's or CuPy's, and keeps it mapped."""

    memory: Any
    attributes: BufferAttributes


@dataclass(frozen=True, slots=True)
class _Named:
    region: MappedRegion
    status: RegionStatus


class SharedMemoryManager:
    """Registers, finds and unregisters mapped regions. Thread-safe.

    Parameters
    ----------
    max_mapped_bytes : int, optional
        How much may be mapped at once. Regions that nobody uses make room, the longest unused first.
    cuda : CudaAccess, optional
        For memory of GPUs.

    Attributes
    ----------
    slots : dict of str to Slot
        Slots of mapped regions, by their addresses, as requests say them. To be read without a lock.
    """

    def __init__(self, max_mapped_bytes: int | None = None, cuda: CudaAccess | None = None) -> None:
        self._cuda = cuda or CudaAccess()
        self._max_mapped_bytes = max_mapped_bytes
        self._lock = threading.RLock()
        self._names: dict[str, _Named] = {}
        self._regions: weakref.WeakSet[MappedRegion] = weakref.WeakSet()  # with those that only calls hold
        self.slots: dict[str, Slot] = {}

    def register_system_shared_memory(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a POSIX shared-memory object and give a part of it a name.

        Parameters
        ----------
        name : str
            Must be free.
        key : str
            The object's name in /dev/shm, with or without a leading slash.
        offset, byte_size : int
            The part that the name stands for.

        Raises
        ------
        CallerError
            The name is taken, or offset and size make no sense.
        RegionGoneError
            There is no such object.
        RegionRefusedError
            It may not be opened, or is too small.
        MachineError
            Too much is mapped already.
        """
        _check_range(name, offset, byte_size, _MAX_INT64)
        file = key.removeprefix("/")
        if not file or "/" in file or file in (".", ".."):
            raise RegionRefusedError(f"region {name!r}", "its key is not the name of an object directly in /dev/shm")
        end = offset + byte_size
        self.register(name, lambda: MappedRegion(SystemSegment.open(file, end, f"region {name!r}")), offset, byte_size)

    def register_cuda_shared_memory(self, name: str, handle: bytes, byte_size: int, device_id: int) -> None:
        """Map device memory that another process has exported, and give it a name. It stays mapped while it has one.

        Parameters
        ----------
        name : str
            Must be free.
        handle : bytes
            The 64 bytes of its CUDA IPC handle.
        byte_size : int
            Of the memory.
        device_id : int
            This process' number of the GPU.

        Raises
        ------
        CallerError
            The name is taken, or the size makes no sense.
        RegionRefusedError
            The memory cannot be mapped, or is smaller.
        MachineError
            CuPy or a GPU is missing, or too much is mapped already.
        """
        _check_range(name, 0, byte_size, _MAX_INT64)

        def map_memory() -> MappedRegion:
            return MappedRegion(self._cuda.mappings.map(handle, byte_size, device_id, f"region {name!r}"))

        self.register(name, map_memory, 0, byte_size)

    def register(self, name: str, opener: Callable[[], MappedRegion], offset: int, byte_size: int) -> MappedRegion:
        """Give a part of what ``opener`` opens a name, and return its mapping; raises what it raises, and the above."""
        with self._lock:
            if name in self._names:
                raise CallerError(f"region {name!r} is registered already; unregister it first")
            try:
                opened = opener()
            except NoDescriptorsError:
                self._drop_oldest_idle()
                opened = opener()
            segment = opened.segment
            region = self._find_mapping_like(opened)
            if region is None:
                self._make_room(segment.byte_size)
                region = opened
                region.keep()
                self._regions.add(region)
            region.names.add(name)
            self._names[name] = _Named(region, RegionStatus(name, segment.key, offset, byte_size))
            region.last_use = time.monotonic()
            return region

    def obtain(
        self, name: str, opener: Callable[[], MappedRegion], offset: int, byte_size: int, field: str
    ) -> MappedRegion:
        """Return what has this name, as :meth:`register` would make it, and make it if nothing has.

        What was removed by its owner is made anew: the name may have another object by now. ``field`` is what to call
        it in messages.

        Raises
        ------
        RegionRefusedError
            It was truncated.
        """
        with self._lock:
            named = self._names.get(name)
            if named is not None:
                try:
                    named.region.segment.check(0, field)
                except RegionGoneError:
                    self.unregister(name)
                else:
                    return named.region
            self.drop_abandoned()  # what is mapped now should not have to wait until somebody looks after the others
            return self.register(name, opener, offset, byte_size)

    def add_slot(self, address: str, region: MappedRegion, number: int) -> Slot:
        """Return a slot of a managed region, and remember it for as long as the region is registered."""
        with self._lock:
            slot = Slot(region, number)
            if region.names:
                region.addresses.append(address)
                self.slots[address] = slot
            return slot

    def find(self, name: str) -> tuple[MappedRegion, RegionStatus] | None:
        """Return the mapping that a name stands for, and which part of it; None if the name is free."""
        with self._lock:
            named = self._names.get(name)
            return None if named is None else (named.region, named.status)

    def get_memory_info(self, name: str, offset: int, byte_size: int) -> MemoryInfo:
        """Return a part of a registered region.

        Parameters
        ----------
        name : str
            As registered.
        offset, byte_size : int
            Within the part that is registered under the name.

        Raises
        ------
        RegionGoneError
            The name is not registered, or the object behind it was removed.
        CallerError
            The part is not inside the region.
        RegionRefusedError
            The object was truncated.
        """
        with self._lock:
            named = self._names.get(name)
            if named is None:
                raise RegionGoneError(f"region {name!r} is not registered")
            status = named.status
            _check_range(name, offset, byte_size, status.byte_size)
            named.region.segment.check(status.offset + status.byte_size, f"region {name!r}")
            named.region.last_use = time.monotonic()
            memory = named.region.memory.part(status.offset + offset, byte_size)
            return MemoryInfo(memory.bytes(), memory.attributes())

    def unregister(self, name: str) -> None:
        """Free a name. Its region goes with its last name, or its last use after that. A free name is fine."""
        with self._lock:
            named = self._names.pop(name, None)
            if named is None:
                return
            region = named.region
            region.names.discard(name)
            if not region.names:
                for address in region.addresses:
                    self.slots.pop(address, None)
                region.addresses.clear()

    def unregister_all(self) -> None:
        """Free every name."""
        with self._lock:
            for name in list(self._names):
                self.unregister(name)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Return what is registered under a name, or under every name.

        Raises
        ------
        RegionGoneError
            The name is not registered.
        """
        with self._lock:
            if not name:
                return [named.status for named in self._names.values()]
            if name not in self._names:
                raise RegionGoneError(f"region {name!r} is not registered")
            return [self._names[name].status]

    @property
    def mapped_bytes(self) -> int:
        """How much is mapped."""
        with self._lock:
            return sum(region.segment.byte_size for region in list(self._regions))

    @property
    def mapped_regions(self) -> int:
        """How many regions are mapped."""
        with self._lock:
            return len(self._regions)

    def mapped(self) -> tuple[int, int]:
        """Return how many bytes are mapped, and how many regions."""
        return self.mapped_bytes, self.mapped_regions

    def begin_use(self, regions: Sequence[MappedRegion]) -> None:
        """Keep these regions from making room for others until :meth:`end_use`."""
        with self._lock:
            for region in regions:
                region.use_count += 1
                region.last_use = time.monotonic()

    def end_use(self, regions: Sequence[MappedRegion]) -> None:
        """End what :meth:`begin_use` began."""
        with self._lock:
            for region in regions:
                region.use_count -= 1

    def drop(self, region: MappedRegion) -> None:
        """Free every name of a region."""
        with self._lock:
            for name in list(region.names):
                self.unregister(name)

    def drop_abandoned(self) -> None:
        """Free the names of regions that their owners have unlinked, or left behind when they died."""
        with self._lock:
            for region in list(self._regions):
                if region.is_abandoned:
                    self.drop(region)

    def _find_mapping_like(self, opened: MappedRegion) -> MappedRegion | None:
        """Return the mapping of the same object, unless the object has grown since, or the mapping is going.

        A region that was opened as one of ours has slots; a mapping without a header, made for a registered name of the
        same object, does not serve it.
        """
        segment = opened.segment
        for region in list(self._regions):
            mapped = region.segment
            is_same = mapped.identity == segment.identity and mapped.byte_size == segment.byte_size
            if is_same and region.names and (opened.managed is None or region.managed is not None):
                return region
        return None

    def _drop_oldest_idle(self) -> None:
        """Unmap some regions that nobody uses, so that there are file descriptors for others."""
        idle = sorted((region for region in list(self._regions) if not region.is_in_use), key=_last_use)
        for region in idle[: 1 + len(idle) // _SHARE_DROPPED]:
            self.drop(region)

    def _make_room(self, byte_size: int) -> None:
        limit = self._max_mapped_bytes
        if limit is None:
            return
        mapped = list(self._regions)
        in_use = sum(region.segment.byte_size for region in mapped if region.is_in_use)
        if in_use + byte_size > limit:
            raise MachineError(
                f"a region of {byte_size} bytes cannot be mapped: {in_use} are mapped and in use, and the limit "
                f"(SHM_MAX_MAPPED_BYTES) is {limit}; raise it, or use smaller regions"
            )
        idle = sorted((region for region in mapped if not region.is_in_use), key=_last_use, reverse=True)
        excess = sum(region.segment.byte_size for region in mapped) + byte_size - limit
        while excess > 0:
            region = idle.pop()
            excess -= region.segment.byte_size
            self.drop(region)


def _last_use(region: MappedRegion) -> float:
    return region.last_use


def _check_range(name: str, offset: int, byte_size: int, size: int) -> None:
    if offset < 0 or byte_size < 0 or offset + byte_size > size:
        raise CallerError(
            f"bytes {offset} to {offset + byte_size} of region {name!r} were asked for; expected 0 to {size}"
        )
