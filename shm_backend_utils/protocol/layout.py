"""The layout of a managed region, version 2: a header, slot records, data. Pure: it reads and writes a buffer.

::

    offset                 0 ┌──────────────────────────────────────────────────────┐
                             │ header                                               │
                           0 │   magic             8 bytes  "SHMBUREG"              │
                           8 │   version           u32      written last: ready     │
                          12 │   slot_count        u32                              │
                          16 │   byte_size         u64      of the whole region     │
                          24 │   token             16 bytes                         │
                          40 │   record_byte_size  u32      a multiple of PAGE_SIZE │
                   PAGE_SIZE ├──────────────────────────────────────────────────────┤
                             │ record of slot 0                                     │
                           0 │   generation, table          the client writes       │
        record_byte_size / 2 │   started, completed, results    the model writes    │
                             ├──────────────────────────────────────────────────────┤
                             │ record of slot 1 …                                   │
    PAGE_SIZE + slot_count · ├──────────────────────────────────────────────────────┤
            record_byte_size │ data                                                 │
                   byte_size └──────────────────────────────────────────────────────┘

Integers are little-endian. :mod:`.table` describes a record's first half, :mod:`.results` its second.
Generations and stamps are aligned native words, so each load and store of one is atomic. The RPC orders the two
sides: the client writes before it sends the request, and the model writes before it answers. Only ``completed`` may
follow the answer: then a GPU of the model's writes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

__all__ = [
    "COMPLETED",
    "GENERATION",
    "HEADER_LENGTH",
    "LOST",
    "MAX_RECORD_BYTE_SIZE",
    "MAX_SLOT_COUNT",
    "PAGE_SIZE",
    "RESULTS",
    "STARTED",
    "TOKEN_LENGTH",
    "VERSION",
    "Header",
    "SlotRecord",
    "completed_offset",
    "data_offset",
    "parse_header",
    "record_offset",
    "write_header",
]

PAGE_SIZE: Final = 4096
TOKEN_LENGTH: Final = 16
VERSION: Final = 2
"""The version of the protocol."""
MAX_SLOT_COUNT: Final = 1024
MAX_RECORD_BYTE_SIZE: Final = 1 << 20

_MAGIC: Final = b"SHMBUREG"
_HEADER: Final = struct.Struct("<8sIIQ16sI")
HEADER_LENGTH: Final = _HEADER.size
_VERSION_FIELD: Final = struct.Struct("<I")
_VERSION_OFFSET: Final = len(_MAGIC)

_WORD: Final = 8
GENERATION: Final = 0  # the first word of the client's half
STARTED, COMPLETED = 0, 1  # the first words of the model's half
RESULTS: Final = 2 * _WORD  # behind the two stamps
LOST: Final = 2**63 - 1
"""What the client writes to ``completed`` if the model died before its GPU did: streams go on, and nothing is done."""


@dataclass(frozen=True, slots=True)
class Header:
    """A region's header, copied out of shared memory and checked."""

    slot_count: int
    byte_size: int  # of the whole region
    token: bytes  # the secret that a request must name: 16 bytes
    record_byte_size: int = PAGE_SIZE  # of each slot's record


def data_offset(slot_count: int, record_byte_size: int) -> int:
    """Return where the data of a region begins, in bytes from the region's beginning."""
    return PAGE_SIZE + slot_count * record_byte_size


def record_offset(slot: int, record_byte_size: int) -> int:
    """Return where the record of a slot begins, in bytes from the region's beginning."""
    return PAGE_SIZE + slot * record_byte_size


def completed_offset(slot: int, record_byte_size: int) -> int:
    """Return where a slot's ``completed`` lies, in bytes from the region's beginning."""
    return record_offset(slot, record_byte_size) + record_byte_size // 2 + COMPLETED * _WORD


def write_header(buffer: memoryview, header: Header) -> None:
    """Write the header, and the version last, as the version marks the header as ready."""
    _HEADER.pack_into(buffer, 0, _MAGIC, 0, header.slot_count, header.byte_size, header.token, header.record_byte_size)
    _VERSION_FIELD.pack_into(buffer, _VERSION_OFFSET, VERSION)


def parse_header(data: bytes, byte_size: int) -> Header | None:
    """Return the header in a copy of a region's first bytes; None if it is not ready, wrong, or beyond the file."""
    if len(data) < HEADER_LENGTH:
        return None
    magic, version, slot_count, claimed, token, record_byte_size = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION or not 1 <= slot_count <= MAX_SLOT_COUNT:
        return None
    if record_byte_size % PAGE_SIZE or not PAGE_SIZE <= record_byte_size <= MAX_RECORD_BYTE_SIZE:
        return None
    if not data_offset(slot_count, record_byte_size) <= claimed <= byte_size:
        return None
    return Header(slot_count, claimed, token, record_byte_size)


class SlotRecord:
    """One slot's record, which keeps the region's buffer alive. Clients write ``request``, models ``results``.

    Callers read and write ``client_words`` and ``model_words`` directly: a function call costs more than the access.
    """

    __slots__ = ("client_words", "model_words", "request", "results", "results_room", "room", "table")

    def __init__(self, buffer: memoryview, slot: int, record_byte_size: int) -> None:
        begin = record_offset(slot, record_byte_size)
        self.room = record_byte_size // 2  # bytes of each half
        self.results_room = self.room - RESULTS  # the most bytes of results, which follow the two stamps
        self.request = buffer[begin : begin + self.room]
        self.results = buffer[begin + self.room : begin + record_byte_size]
        self.table = self.request[_WORD:]  # ``request`` without the generation
        self.client_words = self.request.cast("Q")  # the generation is the first
        self.model_words = self.results.cast("Q")

    @property
    def generation(self) -> int:
        """The slot's use count, which the client raises before it sends a request."""
        return self.client_words[GENERATION]

    @generation.setter
    def generation(self, value: int) -> None:
        self.client_words[GENERATION] = value

    def begin(self, generation: int, table: bytes) -> None:
        """Write a table of :func:`.table.encode`, at most ``room`` bytes less a word, and then the generation."""
        self.table[: len(table)] = table
        self.client_words[GENERATION] = generation

    @property
    def started(self) -> int:
        """The last generation that a model began to execute."""
        return self.model_words[STARTED]

    def start(self, generation: int) -> bool:
        """Record that a model starts a generation; return False if a model has started this or a later one before."""
        words = self.model_words
        if words[STARTED] >= generation:
            return False
        words[STARTED] = generation
        return True

    @property
    def completed(self) -> int:
        """The last generation that a model finished, successfully or not."""
        return self.model_words[COMPLETED]

    @property
    def is_at_rest(self) -> bool:
        """Whether models have finished every generation that they started here."""
        words = self.model_words
        return words[STARTED] == words[COMPLETED]

    def complete(self, generation: int, results: bytes) -> None:
        """Write a generation's results, as :func:`.results.encode` returns them, and then the completion stamp."""
        self.results[RESULTS : RESULTS + len(results)] = results
        self.model_words[COMPLETED] = generation
