"""Memory of a model's own, in which it hands tensors to other models: managed regions with one slot each."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..memory.managed import ManagedRegion
from ..memory.rounding import roomy
from ..protocol.descriptor import LentRegionClaim, SystemRegionClaim
from ..protocol.region_layout import PAGE_SIZE

__all__ = ["Scratch", "ScratchSlot"]

_MOST_IDLE: Final = 8


class ScratchSlot:
    """A region whose one slot serves one request to another model at a time. See the client's slots, which are alike.

    Attributes
    ----------
    region : ManagedRegion
        Owned by this process.
    generation : int
        Of the last request.
    """

    def __init__(self, byte_size: int) -> None:
        self.region = ManagedRegion.create(byte_size)
        self.generation = 0

    @property
    def capacity(self) -> int:
        """Bytes of data."""
        return self.region.header.byte_size - self.region.data_offset

    @property
    def claim(self) -> SystemRegionClaim:
        """The region, as the memory of a request of this slot."""
        header = self.region.header
        return SystemRegionClaim(self.region.segment.key, header.byte_size, header.token.hex(), 0)

    @property
    def lent_claim(self) -> LentRegionClaim:
        """The region, as memory that another slot's request reads."""
        claim = self.claim
        return LentRegionClaim(claim.key, claim.byte_size, claim.token, claim.slot)

    def advance(self) -> int:
        """Begin the next generation and return it."""
        self.generation += 1
        self.region.record(0).generation = self.generation
        return self.generation

    @property
    def is_completed(self) -> bool:
        """Whether the other model has finished with this generation."""
        return self.region.record(0).completed == self.generation

    def destroy(self) -> None:
        """Remove the name. The memory goes with the last array."""
        self.region.segment.unlink()
        self.region.close()


class Scratch:
    """The scratch slots of one session. Thread-safe. A slot is free again when all arrays over it are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ScratchSlot] = []
        self._used: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], ScratchSlot]] = {}

    def take(self, byte_size: int) -> tuple[ScratchSlot, npt.NDArray[np.uint8]]:
        """Return a slot with so much room for data, and its whole memory, which keeps it from being used again.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left.
        """
        with self._lock:
            fitting = [slot for slot in self._idle if slot.capacity >= byte_size]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.capacity)
                self._idle.remove(slot)
            else:
                slot = ScratchSlot(roomy(max(byte_size, 1), PAGE_SIZE))
            memory = slot.region.bytes()
            reference = weakref.ref(memory, self._put_back)
            self._used[id(reference)] = reference, slot
            return slot, memory

    def find(self, array: npt.NDArray[Any]) -> tuple[ScratchSlot, npt.NDArray[np.uint8], int] | None:
        """Return the slot that an array lies in, with its memory and the array's offset; None if it lies in none."""
        address = array.__array_interface__["data"][0]
        for reference, slot in list(self._used.values()):
            memory = reference()
            if memory is None:
                continue
            offset = address - memory.__array_interface__["data"][0]
            if offset >= 0 and offset + array.nbytes <= memory.nbytes:
                return slot, memory, offset
        return None

    def close(self) -> None:
        """Remove all slots. Arrays over them stay valid."""
        with self._lock:
            slots = [*self._idle, *[slot for _, slot in self._used.values()]]
            self._idle, self._used = [], {}
        for slot in slots:
            slot.destroy()

    def _put_back(self, reference: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        """Take note that nobody has arrays over a slot. It must not wait: whoever lets go of the last one calls it."""
        found = self._used.pop(id(reference), None)
        if found is None:
            return  # the session was closed
        slot = found[1]
        if slot.is_completed and len(self._idle) < _MOST_IDLE:
            self._idle.append(slot)
        else:
            slot.destroy()  # a model may still be writing there, or there are plenty
