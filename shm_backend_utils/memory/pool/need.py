"""What a call needs of a region, how large a region for it is, and its place among those that wait for one."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...protocol.layout import PAGE_SIZE, data_offset
from ..kinds import RegionKind
from ..managed import roomy, whole_pages
from .slot import SlotRegion

__all__ = ["DIRECT", "FAR_MORE", "PREPARED", "SMALL", "Need", "Ticket", "least_size", "region_size"]

FAR_MORE: Final = 16
"""So many times what a call needs is left to idle, and to go in time, if it is more than ``SMALL``."""

SMALL: Final = 2**20

DIRECT: Final = "direct"
"""The group of regions for calls on the direct path that need nothing but memory on the host."""

PREPARED: Final = "direct, prepared"
"""The group of those for prepared calls, which have a region by themselves: it may grow."""


class Need(NamedTuple):
    """What a call needs of a region. Regions of different groups, or kinds, are never exchanged."""

    byte_size: int  # of data
    slot_count: int = 1
    record_byte_size: int = PAGE_SIZE  # of each slot's record
    group: str = DIRECT
    kind: RegionKind = RegionKind.SYSTEM


def region_size(need: Need) -> int:
    """Return the size of the region that a pool makes for a need: similar calls fit in it, too."""
    data = roomy(max(need.byte_size, 1), PAGE_SIZE)
    return data + data_offset(need.slot_count, need.record_byte_size)


def least_size(need: Need) -> int:
    """Return the size of the smallest region that meets a need."""
    return whole_pages(max(need.byte_size, 1) + data_offset(need.slot_count, need.record_byte_size))


@dataclass(eq=False)
class Ticket:
    """A request for a region, in the queue or granted: nobody else keeps it, so that it ends with its holder."""

    need: Need
    byte_size: int  # of the whole region, if one is made
    holder: object  # who asks; its text names it to people
    idle: SlotRegion | None = None  # what it was granted; None if one is to be made
    count: int = 1  # of parts, if one is made
    granted: concurrent.futures.Future[SlotRegion | None] = field(default_factory=concurrent.futures.Future)
