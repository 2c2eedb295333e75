"""A managed region: a segment with our header and slot records in front of its data."""

from __future__ import annotations

import hmac
import math
import os
import re
import secrets
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, RegionRefusedError
from ..protocol import region_layout as layout
from ..protocol.region_layout import Header, SlotRecord
from . import locks as lease
from .locks import SlotLease
from .segment import PRIVATE, Access, SystemSegment

__all__ = ["KEY", "KEY_PREFIX", "ManagedRegion", "array_at"]

KEY_PREFIX: Final = "shmbu-"
KEY: Final = re.compile(rf"{KEY_PREFIX}[0-9]+-[0-9a-f]{{16}}")
"""The keys that :meth:`ManagedRegion.create` gives: the process id, for people to read, and a random number."""


class ManagedRegion:
    """A region with a token, slots and data.

    Attributes
    ----------
    segment : SystemSegment
        Owned: closing the region closes it.
    header : Header
        As copied out of shared memory when the region was opened.
    """

    def __init__(self, segment: SystemSegment, header: Header) -> None:
        self.segment = segment
        self.header = header
        self._buffer = segment.buffer()
        slots = range(header.slot_count)
        self._records = tuple(SlotRecord(self._buffer, slot) for slot in slots)
        self._leases = tuple(SlotLease(segment.fileno(), slot) for slot in slots)

    @classmethod
    def create(cls, data_byte_size: int, slot_count: int = 1, access: Access = PRIVATE) -> ManagedRegion:
        """Make a region under a new key, with a new token. The caller owns it and must unlink it.

        The owner's lease is held until the region is closed or this process dies.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left.
        ValueError
            There cannot be that many slots.
        """
        if not 1 <= slot_count <= layout.MAX_SLOT_COUNT:
            raise ValueError(f"a region of {slot_count} slots was asked for; expected 1 to {layout.MAX_SLOT_COUNT}")
        byte_size = layout.data_offset(slot_count) + _whole_pages(data_byte_size)
        header = Header(slot_count, byte_size, secrets.token_bytes(layout.TOKEN_LENGTH))

        def prepare(segment: SystemSegment) -> None:
            lease.hold_owner_lease(segment.fileno())
            layout.write_header(segment.buffer(), header)

        key = f"{KEY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        return cls(SystemSegment.create(key, byte_size, access=access, prepare=prepare), header)

    @classmethod
    def open(cls, key: str, byte_size: int, token: str, field: str) -> ManagedRegion:
        """Open a region that a client made.

        Raises
        ------
        RegionRefusedError
            It has no header of ours, another size, or another token.
        RegionGoneError
            It does not exist.
        """
        segment = SystemSegment.open(key, byte_size, field)
        try:
            header = layout.read_header(segment.buffer())
            if header is None or not header.byte_size == byte_size == segment.byte_size:
                raise RegionRefusedError(field, "it has no header of a managed region of this size")
            if not _same_token(header, token):
                raise RegionRefusedError(field, "the token is not the region's")
        except BaseException:
            segment.close()
            raise
        return cls(segment, header)

    def check(self, byte_size: int, token: str, field: str) -> None:
        """Raise unless the open region is what a request claims it to be; see :meth:`SystemSegment.check`."""
        self.segment.check(byte_size, field)
        if self.header.byte_size != byte_size:
            raise RegionRefusedError(field, "it is not of this size")
        if not _same_token(self.header, token):
            raise RegionRefusedError(field, "the token is not the region's")

    @property
    def data_offset(self) -> int:
        """Where the data begins."""
        return layout.data_offset(self.header.slot_count)

    def record(self, slot: int) -> SlotRecord:
        """Return the record of a slot.

        Raises
        ------
        IndexError
            The region has no such slot.
        ClosedError
            The region was closed.
        """
        if not self._records:
            raise ClosedError("this region")
        return self._records[slot]

    def lease(self, slot: int) -> SlotLease:
        """Return the lease of a slot; raises as :meth:`record`."""
        if not self._leases:
            raise ClosedError("this region")
        return self._leases[slot]

    @property
    def is_orphaned(self) -> bool:
        """Whether the owner is dead, or the region was closed here."""
        return self.segment.is_closed or not lease.is_owner_alive(self.segment.fileno())

    def data(self) -> npt.NDArray[np.uint8]:
        """Return the region's data as bytes, writable. The array, and every view of it, keeps the memory mapped.

        Each call returns an array of its own: when it dies, all views made from it are gone.
        """
        return self.bytes()[self.data_offset :]

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return the whole region as bytes, so that a span's offset is an index."""
        if not self._buffer:
            raise ClosedError("this region")
        return np.frombuffer(self._buffer, np.uint8)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. Arrays over it stay valid. Closing twice is fine."""
        self._records = ()
        self._leases = ()
        self._buffer = memoryview(b"")
        self.segment.close()


def array_at(
    memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], byte_size: int
) -> npt.NDArray[Any] | None:
    """Return a C-contiguous view into a span of ``memory``; None if it would need more than the span's bytes.

    The array keeps ``memory`` alive and is writable if ``memory`` is.
    """
    if math.prod(shape) * dtype.itemsize > byte_size:
        return None
    view: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=memory, offset=offset)
    return view


def _same_token(header: Header, token: str) -> bool:
    return hmac.compare_digest(header.token.hex(), token)


def _whole_pages(byte_size: int) -> int:
    return -(-byte_size // layout.PAGE_SIZE) * layout.PAGE_SIZE
