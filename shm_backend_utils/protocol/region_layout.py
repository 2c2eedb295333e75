"""The header and slot records of a managed region. Pure: it reads and writes a buffer, and opens nothing.

::

    offset              0 ┌────────────────────────────────────────────────────┐
                          │ header                                             │
                        0 │   magic           8 bytes  "SHMBUREG"              │
                        8 │   version         u32      written last: ready     │
                       12 │   slot_count      u32                              │
                       16 │   byte_size       u64      of the whole region     │
                       24 │   token          16 bytes                          │
                PAGE_SIZE ├────────────────────────────────────────────────────┤
                          │ slot record 0                                      │
                        0 │   generation      u64      the client writes       │
                       64 │   started         u64      ┐                       │
                       72 │   completed       u64      │ the model writes      │
                       80 │   results_length  u64      │                       │
                       88 │   results         JSON     ┘                       │
            2 · PAGE_SIZE ├────────────────────────────────────────────────────┤
                          │ slot record 1 …                                    │
    (1 + slot_count) · PAGE_SIZE ├─────────────────────────────────────────────┤
                          │ data                                               │
                byte_size └────────────────────────────────────────────────────┘

Integers are little-endian. A record has a page of its own, and the two writers' halves of it lie on different cache
lines. Its integers are aligned, and read and written as native words, so that each is loaded and stored at once (the
``struct`` module would clear the field first). The RPC's request and reply order the two sides: the client writes
``generation`` before it sends, the model writes the rest before it answers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

__all__ = [
    "HEADER_LENGTH",
    "MAX_RESULTS_LENGTH",
    "MAX_SLOT_COUNT",
    "PAGE_SIZE",
    "TOKEN_LENGTH",
    "Buffer",
    "Header",
    "SlotRecord",
    "data_offset",
    "parse_header",
    "read_header",
    "record_offset",
    "write_header",
]

PAGE_SIZE: Final = 4096
TOKEN_LENGTH: Final = 16
VERSION: Final = 1
MAX_SLOT_COUNT: Final = 1024
"""What a header may claim. Whoever opens a region spends time and memory on each of its slots."""

_MAGIC: Final = b"SHMBUREG"
_HEADER: Final = struct.Struct("<8sIIQ16s")
HEADER_LENGTH: Final = _HEADER.size
_VERSION_FIELD: Final = struct.Struct("<I")
_VERSION_OFFSET: Final = len(_MAGIC)

_WORD: Final = 8
_GENERATION: Final = 0
_STARTED: Final = 64 // _WORD  # the next cache line
_COMPLETED: Final = _STARTED + 1
_RESULTS_LENGTH: Final = _COMPLETED + 1
_RESULTS: Final = (_RESULTS_LENGTH + 1) * _WORD

MAX_RESULTS_LENGTH: Final = PAGE_SIZE - _RESULTS

Buffer = memoryview
"""A writable, contiguous view of bytes over a mapping."""


@dataclass(frozen=True, slots=True)
class Header:
    """A region's header, copied out of shared memory."""

    slot_count: int
    byte_size: int
    token: bytes


def data_offset(slot_count: int) -> int:
    """Return where the data of a region with this many slots begins."""
    return record_offset(slot_count)


def record_offset(slot: int) -> int:
    """Return where the record of a slot begins."""
    return PAGE_SIZE * (1 + slot)


def write_header(buffer: Buffer, header: Header) -> None:
    """Write the header; the version, which marks it as ready, last."""
    _HEADER.pack_into(buffer, 0, _MAGIC, 0, header.slot_count, header.byte_size, header.token)
    _VERSION_FIELD.pack_into(buffer, _VERSION_OFFSET, VERSION)


def read_header(buffer: Buffer) -> Header | None:
    """Copy the header out and return it; None if the buffer does not begin with a ready one that fits its size."""
    header = parse_header(bytes(buffer[:HEADER_LENGTH]))
    if header is None or not data_offset(header.slot_count) <= header.byte_size <= len(buffer):
        return None
    return header


def parse_header(data: bytes) -> Header | None:
    """Return the header that was copied out of a region; None if it is no ready one."""
    if len(data) < HEADER_LENGTH:
        return None
    magic, version, slot_count, byte_size, token = _HEADER.unpack(data)
    if magic != _MAGIC or version != VERSION or not 1 <= slot_count <= MAX_SLOT_COUNT:
        return None
    return Header(slot_count, byte_size, token)


class SlotRecord:
    """One slot's record. Every read is a fresh copy out of shared memory.

    Parameters
    ----------
    buffer : memoryview
        Over the whole region.
    slot : int
        Less than the header's ``slot_count``.
    """

    __slots__ = ("_bytes", "_words")

    def __init__(self, buffer: Buffer, slot: int) -> None:
        self._bytes = buffer[record_offset(slot) : record_offset(slot + 1)]
        self._words = self._bytes.cast("Q")

    @property
    def generation(self) -> int:
        """The slot's use count. The client writes it, before it sends the request."""
        return self._words[_GENERATION]

    @generation.setter
    def generation(self, value: int) -> None:
        self._words[_GENERATION] = value

    @property
    def started(self) -> int:
        """The generation that a model has begun to execute last. The model writes it."""
        return self._words[_STARTED]

    @started.setter
    def started(self, value: int) -> None:
        self._words[_STARTED] = value

    @property
    def completed(self) -> int:
        """The generation that a model has finished last, after its results. The model writes it."""
        return self._words[_COMPLETED]

    def complete(self, generation: int, results: bytes) -> None:
        """Write the results of a generation, and then its completion stamp.

        ``results`` has at most :data:`MAX_RESULTS_LENGTH` bytes; it is empty if the call failed.
        """
        self._bytes[_RESULTS : _RESULTS + len(results)] = results
        self._words[_RESULTS_LENGTH] = len(results)
        self._words[_COMPLETED] = generation

    def results(self) -> bytes:
        """Copy the results out. At most :data:`MAX_RESULTS_LENGTH` bytes, whatever the length field claims."""
        length = min(self._words[_RESULTS_LENGTH], MAX_RESULTS_LENGTH)
        return bytes(self._bytes[_RESULTS : _RESULTS + length])
