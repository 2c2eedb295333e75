"""One mapping of this process, of any kind, and the slots in it.

A mapping is closed when neither the registry nor a call refers to it any more. So a region that its owner has
abandoned, or whose name now means another region, is unmapped after its last use. Arrays keep the memory mapped, but
do not keep the file descriptor open.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable

import numpy as np

from ...errors import (
    PeerError,
    RegionGoneError,
    RegionRefusedError,
    ReplayedRequestError,
    SlotInUseError,
    StaleRequestError,
    TableError,
)
from ...gpu.memory.mappings import CudaMapping
from ...memory import locks
from ...memory.locks import OWNERS_LEASE, UNLOCKED, SharedLease
from ...memory.managed import ManagedRegion
from ...memory.segment import MappedSegment, SealedSegment
from ...memory.shared_file import BLOCK_SIZE
from ...protocol import table
from ...protocol.claims import LentRegionClaim
from ...protocol.form import TableForm
from ...protocol.layout import GENERATION, SlotRecord
from ...protocol.probe import Probe, decode_probe, is_probe
from ...protocol.spans import Table
from ...tensors.view import MemoryType
from .memory import DeviceMemory, HostMemory, MappedMemory, Pinning

__all__ = ["MappedRegion", "MappedSlot", "ProbeFound", "replayed", "stale"]


class ProbeFound(Exception):  # noqa: N818  # not an error: the code that answers the probe catches it
    """The request is a probe. The slot's lease is held: give it back when you catch this."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.probe = probe


class MappedRegion:
    """One mapping, closed when nothing refers to it; ``fence`` is the region with the slot that fences GPU memory."""

    __slots__ = (
        "__weakref__",
        "_fence",
        "_unpin",
        "addresses",
        "last_use",
        "managed",
        "memory",
        "names",
        "segment",
        "use_count",
    )

    def __init__(self, opened: ManagedRegion | MappedSegment | CudaMapping, fence: MappedRegion | None = None) -> None:
        self._unpin: Callable[[], None] | None = None
        self._fence = fence
        self.managed = opened if isinstance(opened, ManagedRegion) else None  # None for a foreign region
        self.segment = opened.segment if isinstance(opened, ManagedRegion) else opened
        self.memory = _memory_of(opened)  # the whole mapping, writable
        self.names: set[str] = set()  # the mapping's names in the registry
        self.addresses: list[str] = []  # the addresses of its slots, as requests name them
        self.use_count = 0  # the number of calls that use the mapping as a further region
        self.last_use = time.monotonic()

    @property
    def is_in_use(self) -> bool:
        return self.use_count > 0 or (self.managed is not None and self.managed.is_in_use)

    @property
    def is_abandoned(self) -> bool:
        """Whether the owner has unlinked the region, or has died. GPU memory is abandoned with its fencing region."""
        if isinstance(self.segment, CudaMapping):
            return self._fence is not None and self._fence.is_abandoned
        return (self.managed is not None and self.managed.is_owner_gone) or self.segment.is_unlinked

    def pin(self, pinning: Pinning) -> None:
        if isinstance(self.memory, HostMemory):
            self._unpin = pinning.pin(self.memory.array)
            if self._unpin is not None:
                self.memory.memory_type = MemoryType.CPU_PINNED

    def know_space_of(self, opened: MappedRegion) -> None:
        """Adopt the allocated size that a newer mapping of the same object has found, if that size is larger."""
        mine, other = self.segment, opened.segment
        if isinstance(mine, MappedSegment) and isinstance(other, MappedSegment):
            mine.space = max(mine.space, other.space)

    def close_unused(self) -> None:
        """Unmap GPU memory that was never used: the owner may free the memory as soon as the answer arrives."""
        if isinstance(self.segment, CudaMapping):
            self.segment.close_unused()

    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin()
        opened = getattr(self, "managed", None) or getattr(self, "segment", None)
        if opened is not None:
            opened.close()


class MappedSlot:
    """A slot of a managed region, for one request at a time. It caches constants and keeps the region mapped."""

    __slots__ = (
        "_block_count",
        "_byte_size",
        "_data_begin",
        "_fd",
        "_is_sealed",
        "_record_offset",
        "lease",
        "memories",
        "memory",
        "number",
        "record",
        "region",
    )

    def __init__(self, region: MappedRegion, number: int) -> None:
        managed, memory = region.managed, region.memory
        assert managed is not None
        assert isinstance(memory, HostMemory)
        self.region = region
        self.number = number
        self.memory = memory  # the whole region, because the offsets of spans count from its beginning
        self.memories: tuple[MappedMemory, ...] = (memory,)  # for a request without further regions
        self.record: SlotRecord = managed.record(number)
        self.lease = managed.lease(number)  # this process holds the lease from claim() until the request ends
        self._fd = managed.segment.fileno()
        self._record_offset = managed.record_offset(number)
        self._is_sealed = isinstance(managed.segment, SealedSegment)  # it has no name: a lease shows a living owner
        self._byte_size = managed.header.byte_size
        self._block_count = -(-self._byte_size // BLOCK_SIZE)
        self._data_begin = managed.data_offset

    def claim(self, generation: int, form: TableForm | None = None) -> Table:
        """Take the slot's lease and return the checked table; the caller gives the lease back, even on ProbeFound."""
        status = os.fstat(self._fd)
        if not status.st_nlink and (
            not self._is_sealed or fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, OWNERS_LEASE).startswith(UNLOCKED)
        ):
            raise RegionGoneError("the request's region was removed by its owner")
        # A file that shrinks after this check kills this process by SIGBUS; sealed memory cannot shrink.
        if status.st_size < self._byte_size or status.st_blocks < self._block_count:
            raise RegionRefusedError(
                "the request's region",
                f"its {self._byte_size} bytes are not there any more: it was truncated, or has holes",
            )
        record = self.record
        if record.client_words[GENERATION] != generation:
            raise stale()
        if not self.lease.take():
            raise self._held(generation)
        data = b""
        try:
            data = bytes(record.request)
            found_table = None if form is None else form.decode(data, generation, self._data_begin, self._byte_size)
            if found_table is None:
                found, found_table = table.decode(data, self._data_begin, self._byte_size)
                if found != generation:
                    raise stale()
        except BaseException as error:
            try:
                if isinstance(error, TableError):
                    self._look_again(data, generation)
            except ProbeFound as probe:
                raise probe from None  # the code that catches it gives the lease back
            except BaseException as better:
                self.lease.give_back()
                raise better from None
            self.lease.give_back()
            raise
        return found_table

    def _look_again(self, data: bytes, generation: int) -> None:
        """Raise StaleRequestError if the record holds another request's table, and ProbeFound if it holds a probe."""
        if int.from_bytes(data[:8], "little") != generation:
            raise stale()
        if is_probe(data):
            raise ProbeFound(decode_probe(data, self._data_begin, self._byte_size))

    def work(self) -> SharedLease:
        """Return a lease that shows the client a GPU of this process at work in the slot, after the answer."""
        return locks.work(self._fd, self._record_offset)

    def lent_claim(self) -> LentRegionClaim:
        """Return a claim of this slot's region, to lend it to another model while this slot's request is executed."""
        managed = self.region.managed
        assert managed is not None
        header = managed.header
        return LentRegionClaim(managed.segment.key, header.byte_size, header.token.hex(), self.number)

    def _held(self, generation: int) -> PeerError:
        if self.record.generation != generation:
            return stale()
        if self.record.started >= generation:
            return replayed()
        return SlotInUseError("the slot is in use by another request, or the client is taking it back")


def replayed() -> ReplayedRequestError:
    return ReplayedRequestError(
        "request parameter shm_generation was executed before: every request needs a new generation"
    )


def stale() -> StaleRequestError:
    return StaleRequestError("request parameter shm_generation is not the slot's: the client has given this request up")


def _memory_of(opened: ManagedRegion | MappedSegment | CudaMapping) -> MappedMemory:
    if isinstance(opened, CudaMapping):
        return DeviceMemory(opened, 0, opened.byte_size)
    if isinstance(opened, ManagedRegion):
        return HostMemory(opened.bytes(), data_begin=opened.data_offset)
    return HostMemory(np.frombuffer(opened.buffer(), np.uint8))
