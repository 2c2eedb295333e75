"""The memory that a model may lend to another one: its client's, and its own scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from ..protocol.descriptor import CudaRegionClaim, LentRegionClaim, RegionClaim, SystemRegionClaim
from .direct import DirectPlan
from .memory import HostMemory, Memory
from .scratch import Scratch

__all__ = ["Lending", "Place"]


class Place(NamedTuple):
    """Where a tensor lies: in which of the regions of a request to another model, and where there."""

    region: int
    offset: int


class Lending:
    """The regions of one request to another model; the first is the scratch slot that fences the request.

    Parameters
    ----------
    plan : DirectPlan or None
        Of the request that the model executes, if its client shares memory.
    scratch : Scratch
        The session's.

    Attributes
    ----------
    claims : list of RegionClaim
        As the descriptor has them. The first is added by :meth:`set_own`.
    memories : list of Memory
        The same regions in this process.
    """

    def __init__(self, plan: DirectPlan | None, scratch: Scratch) -> None:
        self._plan = plan
        self._scratch = scratch
        self._indices: dict[RegionClaim, int] = {}
        self.claims: list[RegionClaim] = [_NONE_YET]
        self.memories: list[Memory] = [HostMemory(np.empty(0, np.uint8))]

    def set_own(self, claim: SystemRegionClaim, memory: Memory) -> None:
        """Set the first region."""
        self.claims[0] = claim
        self.memories[0] = memory

    def place_of(self, array: Any) -> Place | None:
        """Return where a C-contiguous array lies, if that is memory to lend; None otherwise."""
        if not array.nbytes:
            return None
        for index, memory in enumerate([] if self._plan is None else self._plan.memories):
            offset = memory.offset_of(array)
            if offset is not None and 0 <= offset <= memory.attributes().byte_size - array.nbytes:
                return Place(self._client_region(index), offset)
        if isinstance(array, np.ndarray) and array.flags.c_contiguous:
            found = self._scratch.find(array)
            if found is not None:
                slot, slot_memory, offset = found
                return Place(self._add(slot.lent_claim, lambda: HostMemory(slot_memory)), offset)
        return None

    def _client_region(self, index: int) -> int:
        assert self._plan is not None
        claim, memory = self._plan.descriptor.regions[index], self._plan.memories[index]
        if isinstance(claim, SystemRegionClaim):
            claim = LentRegionClaim(claim.key, claim.byte_size, claim.token, claim.slot)
        elif isinstance(claim, CudaRegionClaim) and claim.slot_region is not None:
            claim = replace(claim, slot_region=self._client_region(claim.slot_region))
        return self._add(claim, lambda: memory)

    def _add(self, claim: RegionClaim, memory: Callable[[], Memory]) -> int:
        index = self._indices.get(claim)
        if index is None:
            index = self._indices[claim] = len(self.claims)
            self.claims.append(claim)
            self.memories.append(memory())
        return index


_NONE_YET: Final = SystemRegionClaim("", 1, "", 0)
