"""Regions for several calls that come at once: to make and to map one for each would take longer than the calls."""

from __future__ import annotations

from ..access import Access
from ..kinds import RegionKind
from ..managed import ManagedRegion
from .slot import SlotRegion, Whole

__all__ = ["RegionPart", "make_parts"]


class RegionPart(SlotRegion):
    """One slot of a region, and as much of its data as each has. The region goes with the last of its parts."""

    __slots__ = ()

    def __init__(self, region: ManagedRegion, kind: RegionKind, index: int, whole: Whole) -> None:
        size = (region.header.byte_size - region.data_offset) // region.header.slot_count
        begin = region.data_offset + index * size
        self._take(region, kind, range(index, index + 1), begin, begin + size, whole)

    def destroy(self) -> None:
        """Let go of the part, and let nobody new open the region if it was the last one."""
        self.whole.parts.discard(self.slots[0].index)
        if self.whole.parts:
            self._let_go()
        else:
            super().destroy()


def make_parts(
    count: int, byte_size: int, record_byte_size: int, access: Access, deadline: float, kind: RegionKind
) -> list[SlotRegion]:
    """Make a region of ``count`` parts, each with ``byte_size`` bytes; raises as :meth:`.ManagedRegion.create`."""
    region = ManagedRegion.create(count * byte_size, count, access, record_byte_size, deadline, kind)
    whole = Whole()
    return [RegionPart(region, kind, index, whole) for index in range(count)]
