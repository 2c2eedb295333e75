"""What a call needs of a region, and how large a region for it is."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...protocol.layout import PAGE_SIZE, data_offset
from ..kinds import RegionKind
from ..rounding import roomy, whole_pages

__all__ = ["DIRECT", "FAR_MORE", "SMALL", "Need", "least_size", "region_size"]

FAR_MORE: Final = 16
"""So many times what a call needs is left to idle, and to go in time, if it is more than ``SMALL``."""

SMALL: Final = 2**20

DIRECT: Final = "direct"
"""The group of regions for calls on the direct path that need nothing but memory on the host."""


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
