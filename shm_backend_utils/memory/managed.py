"""A managed region: a segment with a header and slot records in front of its data."""

from __future__ import annotations

import enum
import hmac
import math
import os
import re
import secrets
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, RegionRefusedError
from ..protocol import layout
from ..protocol.layout import Header, SlotRecord
from . import locks
from .descriptors import PRIVATE, Access
from .locks import SlotLease
from .segment import MappedSegment, SealedSegment, SystemSegment
from .shared_file import SealedFile, SharedFile

__all__ = ["KEY", "KEY_PREFIX", "ManagedRegion", "RegionKind", "array_at", "roomy", "whole_pages"]


class RegionKind(enum.Enum):
    """The kind of a managed region."""

    SYSTEM = "system"
    """POSIX shared memory: an object in ``/dev/shm``."""

    SEALED = "sealed"
    """A memfd whose size is sealed, handed over by a socket."""


KEY_PREFIX: Final = "shmbu-"
KEY: Final = re.compile(rf"{KEY_PREFIX}[0-9]+-[0-9a-f]{{16}}")
"""The keys of regions in ``/dev/shm``: the process id, for people to read, and a random number."""


class ManagedRegion:
    """A region with a token, slots and data. Closing it closes its segment."""

    def __init__(self, segment: MappedSegment, header: Header) -> None:
        self.segment = segment
        self.header = header  # as copied out of shared memory when the region was opened
        self.attached: dict[type, Any] = {}  # objects that end with the present mapping
        self._buffer = segment.buffer()
        self._records: dict[int, SlotRecord] = {}
        self._leases: dict[int, SlotLease] = {}

    @classmethod
    def create(
        cls,
        data_byte_size: int,
        slot_count: int = 1,
        access: Access = PRIVATE,
        record_byte_size: int = layout.PAGE_SIZE,
        deadline: float = math.inf,
        kind: RegionKind = RegionKind.SYSTEM,
    ) -> ManagedRegion:
        """Make a region under a new key, with all its memory allocated. The caller owns it and must unlink it."""
        if not 1 <= slot_count <= layout.MAX_SLOT_COUNT:
            raise ValueError(f"a region of {slot_count} slots was asked for; expected 1 to {layout.MAX_SLOT_COUNT}")
        if record_byte_size % layout.PAGE_SIZE or not 0 < record_byte_size <= layout.MAX_RECORD_BYTE_SIZE:
            raise ValueError(
                f"records of {record_byte_size} bytes were asked for; expected a multiple of {layout.PAGE_SIZE}, "
                f"at most {layout.MAX_RECORD_BYTE_SIZE}"
            )
        byte_size = whole_pages(layout.data_offset(slot_count, record_byte_size) + max(data_byte_size, 0))
        header = Header(slot_count, byte_size, secrets.token_bytes(layout.TOKEN_LENGTH), record_byte_size)

        def prepare(segment: MappedSegment) -> None:
            locks.hold_owner_lease(segment.fileno())
            layout.write_header(segment.buffer(), header)

        segment: MappedSegment
        if kind is RegionKind.SYSTEM:
            key = f"{KEY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            segment = SystemSegment.create(key, byte_size, access=access, prepare=prepare, deadline=deadline)
        else:
            segment = SealedSegment.create(byte_size, header.token, access=access, prepare=prepare, deadline=deadline)
        return cls(segment, header)

    @classmethod
    def map(cls, file: SharedFile, token: str) -> ManagedRegion:
        """Map a file whose header has this token, and close the file. All checks read the file before it is mapped."""
        header = layout.parse_header(file.read(layout.HEADER_LENGTH), file.status.st_size)
        if header is None:
            raise RegionRefusedError(file.field, f"it has no header of a managed region of version {layout.VERSION}")
        if not hmac.compare_digest(header.token.hex(), token):
            raise RegionRefusedError(file.field, "the token is not the region's")
        file.check_space(header.byte_size)
        kind: type[MappedSegment] = SealedSegment if isinstance(file, SealedFile) else SystemSegment
        return cls(kind.map(file, header.byte_size), header)

    def grow(self, byte_size: int, deadline: float = math.inf) -> None:
        """Enlarge a region of this process, and give it a new token, so that models map it anew."""
        self.segment.grow(whole_pages(byte_size), deadline)
        token = secrets.token_bytes(layout.TOKEN_LENGTH)
        self.header = replace(self.header, byte_size=self.segment.byte_size, token=token)
        self._buffer, self._records, self.attached = self.segment.buffer(), {}, {}
        layout.write_header(self._buffer, self.header)
        if isinstance(self.segment, SealedSegment):
            self.segment.renew(token)

    @property
    def data_offset(self) -> int:
        """Where the data begins, in bytes from the region's beginning."""
        return layout.data_offset(self.header.slot_count, self.header.record_byte_size)

    def record(self, slot: int) -> SlotRecord:
        """Return the record of a slot, which keeps the memory mapped; IndexError for an unknown slot."""
        record = self._records.get(slot)
        if record is None:
            self._check_slot(slot)
            record = SlotRecord(self._buffer, slot, self.header.record_byte_size)
            record = self._records.setdefault(slot, record)
        return record

    def lease(self, slot: int) -> SlotLease:
        """Return the lease of a slot, the same object for all threads; raises like :meth:`record`."""
        lease = self._leases.get(slot)
        if lease is None:
            self._check_slot(slot)
            lease = self._leases.setdefault(slot, SlotLease(self.segment.fileno(), self.record_offset(slot)))
        return lease

    @property
    def is_in_use(self) -> bool:
        """Whether this process holds the lease of a slot."""
        return any(lease.is_taken_here for lease in list(self._leases.values()))

    def record_offset(self, slot: int) -> int:
        """Return where the record of a slot begins, which is also the byte of its lease."""
        return layout.record_offset(slot, self.header.record_byte_size)

    @property
    def is_owner_gone(self) -> bool:
        """Whether the owner is dead, or the region was closed here."""
        return self.segment.is_closed or not locks.is_owner_alive(self.segment.fileno())

    def data(self) -> npt.NDArray[np.uint8]:
        """Return the region's data as bytes, writable. The array, and every view of it, keeps the memory mapped."""
        return self.bytes()[self.data_offset :]

    def buffer(self) -> memoryview:
        """Return the whole region, writable. It keeps the memory mapped."""
        return self.segment.buffer()

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return the whole region as bytes, so that a span's offset is an index; arrays keep the memory mapped."""
        if not self._buffer:
            raise ClosedError("this region")
        return np.frombuffer(self._buffer, np.uint8)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. Arrays over it stay valid. Closing twice is fine."""
        self.attached = {}
        self._records = {}
        self._leases = {}
        self._buffer = memoryview(b"")
        self.segment.close()

    def _check_slot(self, slot: int) -> None:
        if not self._buffer:
            raise ClosedError("this region")
        if not 0 <= slot < self.header.slot_count:
            raise IndexError(f"slot {slot} of a region that has {self.header.slot_count}")


def array_at(
    memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], byte_size: int
) -> npt.NDArray[Any] | None:
    """Return a C-contiguous view of a span, which keeps the memory mapped; None if the span is too small."""
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} holds pointers; expected a type that shared memory can hold")
    if math.prod(shape) * dtype.itemsize > byte_size:
        return None
    view: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=memory, offset=offset)
    return view


def roomy(byte_size: int, granularity: int) -> int:
    """Return a size that is up to an eighth larger, or up to the next multiple of ``granularity``."""
    step = max(granularity, 1 << max(byte_size.bit_length() - 4, 0))
    return -(-byte_size // step) * step


def whole_pages(byte_size: int) -> int:
    """Return a size rounded up to whole pages, as regions need."""
    return -(-byte_size // layout.PAGE_SIZE) * layout.PAGE_SIZE
