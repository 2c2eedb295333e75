"""The memory that a model lends to another one: its client's, and regions of its own that earlier calls used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...memory.pool.pool import SlotPool
from ...protocol.claims import CudaRegionClaim, LentRegionClaim, RegionClaim
from ...protocol.spans import InputSpan, OutputSpan, Table
from ..mapping.memory import HostMemory, Memory

__all__ = ["Lending", "LentMemory", "NoLending", "Place", "lendable"]


class LentMemory(NamedTuple):
    """Memory of the request that a model executes."""

    claim: RegionClaim  # as in a table; a fence is a number of the request's own regions
    memory: Memory  # the same in this process
    extents: tuple[tuple[int, int], ...]  # of the request's own tensors; what else is there, its slot does not fence


class Place(NamedTuple):
    """Where a tensor lies: in which region of the request to another model, and where there."""

    region: int
    offset: int


class Lending:
    """The further regions of one request to another model. Number 1 is the first of them.

    ``own`` has the regions of the request that the model executes, by their numbers; None for one that is not there.
    """

    def __init__(self, own: Sequence[LentMemory | None], pool: SlotPool) -> None:
        self._own = own
        self.pool = pool
        self._numbers: dict[RegionClaim, int] = {}
        self.claims: list[RegionClaim] = []  # as the table has them
        self.memories: list[Memory] = []  # the same regions in this process

    def place_of(self, array: Any) -> Place | None:
        """Return where a C-contiguous array lies, if that is memory to lend; None otherwise."""
        if not array.nbytes:
            return None
        for number, lent in enumerate(self._own):
            if lent is None:
                continue
            offset = lent.memory.offset_of(array)
            if offset is not None and any(begin <= offset <= end - array.nbytes for begin, end in lent.extents):
                return Place(self._lend_own(number), offset)
        if isinstance(array, np.ndarray) and array.flags.c_contiguous:
            return self._place_in_pool(array)
        return None

    def _place_in_pool(self, array: np.ndarray[Any, Any]) -> Place | None:
        address = array.__array_interface__["data"][0]
        for region, memory in self.pool.held():
            offset = address - memory.__array_interface__["data"][0]
            if 0 <= offset <= memory.nbytes - array.nbytes:
                claim = LentRegionClaim(region.key, region.byte_size, region.token, 0)
                return Place(self._lend(claim, HostMemory(memory)), offset)
        return None

    def _lend_own(self, number: int) -> int:
        lent = self._own[number]
        assert lent is not None
        claim = lent.claim
        if isinstance(claim, CudaRegionClaim):
            fence = None if claim.fence is None else self._lend_own(claim.fence)
            claim = replace(claim, fence=fence, event=b"")  # so that the other model waits: nobody here would
        return self._lend(claim, lent.memory)

    def _lend(self, claim: RegionClaim, memory: Memory) -> int:
        number = self._numbers.get(claim)
        if number is None:
            self.claims.append(claim)
            self.memories.append(memory)
            number = self._numbers[claim] = len(self.claims)
        return number


class NoLending(Lending):
    """Of a request whose tensors are all copied to its own region, as the other model could not open others."""

    def place_of(self, array: Any) -> Place | None:
        return None


def lendable(
    slot: LentRegionClaim | None, table: Table, rooms: Mapping[str, OutputSpan], memories: Sequence[Memory]
) -> list[LentMemory | None]:
    """Return the regions of a request, by their numbers, as another model's request names them.

    ``slot`` is what to say of the region of the request's slot; None if it has none.
    """
    extents: list[list[tuple[int, int]]] = [[] for _ in memories]
    spans: list[InputSpan | OutputSpan] = [*table.inputs.values(), *rooms.values()]
    for span in spans:
        extents[span.region].append((span.offset, span.offset + span.byte_size))
    return [
        None if claim is None else LentMemory(claim, memory, tuple(its))
        for claim, memory, its in zip((slot, *table.regions), memories, extents, strict=True)
    ]
