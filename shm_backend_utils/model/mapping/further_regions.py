"""Regions that a request names beside its own slot: what it uses of them, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import StaleRequestError, TableError
from ...memory.cuda.access import CudaAccess
from ...memory.cuda.mappings import CudaMapping
from ...memory.locks import SharedLease
from ...protocol.claims import CudaRegionClaim, LentRegionClaim
from ...protocol.spans import Extent, InputSpan, OutputSpan, Table, check_extents_are_apart
from .mapped import MappedRegion, Slot
from .memory import Memory
from .registry import Registry

__all__ = ["FurtherRegions", "check_lender", "check_parts_are_apart", "fence_of"]


@dataclass(slots=True)
class FurtherRegions:
    """Regions that a request uses beside its own slot. To be released when the request ends."""

    memories: list[Memory]  # what spans of the table's further regions lie in, in its order
    mapped: list[MappedRegion]  # the same, as they are mapped
    borrowed: list[SharedLease]  # those of lent slots
    passing: list[CudaMapping]  # unmapped before the answer
    _registry: Registry
    _cuda: CudaAccess

    def unmap_passing(self) -> None:
        """Unmap what may be freed after the answer, before that, when GPUs have been waited for.

        What an array of ``model.py`` keeps, goes when that is gone; its lease, by which the client sees it, after that.
        """
        passing, self.passing = self.passing, []
        for mapping in passing:
            mapping.close_idle()
        if passing:
            self._cuda.collect_idle()

    def release(self) -> None:
        """Let go of them. Twice is fine."""
        passing, self.passing = self.passing, []
        for mapping in passing:
            mapping.close()
        mapped, self.mapped = self.mapped, []
        for region in mapped:
            self._registry.end_use(region)
        for lease in self.borrowed:
            lease.give_back()


def check_lender(own: Slot | None) -> None:
    """Raise StaleRequestError unless the request's own region, which is the lender's, has an owner that lives.

    To be asked after the memory was borrowed: a lender that lives then holds the slots until it has the answer, gives
    up, or dies. If it gives up, it raises the generation of its own slot first. TableError if the request
    has no slot.
    """
    if own is None:
        raise TableError("regions", "a lent region", "none: the request has no slot of its own")
    if own.region.managed is None or own.region.managed.is_orphaned:
        raise StaleRequestError("the model that has lent its client's memory to this one is gone")


def fence_of(
    table: Table, claim: CudaRegionClaim, own: Slot | None, found: FurtherRegions
) -> tuple[MappedRegion, int] | None:
    """Return the slot that fences memory of a GPU, as its region and its number; None if there is none.

    TableError if it is that of a request which has no slot.
    """
    if claim.fence is None:
        return None
    if claim.fence:
        lent = table.regions[claim.fence - 1]
        assert isinstance(lent, LentRegionClaim)  # as the protocol has checked
        return found.mapped[claim.fence - 1], lent.slot
    if own is None:
        raise TableError("regions.fence", "0", "none: the request has no slot of its own")
    return own.region, own.number


def check_parts_are_apart(table: Table, found: FurtherRegions) -> None:
    """Raise TableError if an output overlaps another tensor through regions that are parts of one object."""
    extents = [_extent(span, found, "") for span in table.inputs.values() if span.byte_size and span.region]
    extents += [_extent(span, found, name) for name, span in table.outputs.items() if span.byte_size and span.region]
    check_extents_are_apart(extents)


def _extent(span: InputSpan | OutputSpan, found: FurtherRegions, output: str) -> Extent:
    """Return a span's bytes in its object, which the first region of that object stands for."""
    segment, begin = found.mapped[span.region - 1].segment, found.memories[span.region - 1].begin + span.offset
    first = next(number for number, each in enumerate(found.mapped) if each.segment.identity == segment.identity)
    return first, begin, begin + span.byte_size, output
