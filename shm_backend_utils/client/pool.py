"""Slots of shared memory, taken for a call and given back when the last array over them is gone."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from ..descriptor import SystemRegionClaim
from ..errors import ClosedError
from ..region.layout import SlotRecord
from ..region.managed import ManagedRegion
from ..region.system import PRIVATE, Access

__all__ = ["Slot", "SlotPool"]


class Slot:
    """The only slot of a managed region, in use by one call at a time.

    Attributes
    ----------
    generation : int
        Of the request that was sent last; 0 before the first.
    is_in_doubt : bool
        Whether a request got no answer, so that a model may be executing it, or may begin to.
    """

    __slots__ = ("_region", "generation", "is_in_doubt")

    def __init__(self, region: ManagedRegion) -> None:
        self._region = region
        self.generation = 0
        self.is_in_doubt = False

    @property
    def record(self) -> SlotRecord:
        """The slot's record; raises ClosedError once the slot is destroyed."""
        return self._region.record(0)

    @property
    def capacity(self) -> int:
        """Bytes of data."""
        return self._region.header.byte_size - self._region.data_offset

    @property
    def data_offset(self) -> int:
        """Where the data begins in the region."""
        return self._region.data_offset

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return the whole region as bytes. Each call returns an array of its own."""
        return self._region.bytes()

    def claim(self) -> SystemRegionClaim:
        """Return what a descriptor says of the slot."""
        header = self._region.header
        return SystemRegionClaim(self._region.segment.key, header.byte_size, header.token.hex(), 0)

    def advance(self) -> int:
        """Begin the slot's next generation and return it."""
        self.generation += 1
        self.record.generation = self.generation
        return self.generation

    @property
    def is_completed(self) -> bool:
        """Whether the model has finished with this generation, well or not; False once the slot is destroyed."""
        return not self._region.segment.is_closed and self.record.completed == self.generation

    def reclaim(self) -> bool:
        """Make sure that no request that was ever sent will touch the slot again. Return whether that is so now.

        Holding the lease shows that no model executes in the slot; the generation that is raised meanwhile makes every
        request that is still on its way a stale one, which is refused when it arrives.
        """
        lease = self._region.lease(0)
        if not lease.take():
            return False
        try:
            self.advance()
        finally:
            lease.give_back()
        self.is_in_doubt = False
        return True

    def destroy(self) -> None:
        """Remove the region's name. Its memory goes with the last array, here or in the model."""
        self._region.segment.unlink()
        self._region.close()


class SlotPool:
    """Keeps slots for reuse. Thread-safe.

    A slot that comes back in doubt goes into quarantine until it can be reclaimed.
    """

    def __init__(self, access: Access = PRIVATE, *, prefault: bool = False) -> None:
        self._access = access
        self._prefault = prefault
        self._lock = threading.Lock()
        self._idle: list[Slot] = []
        self._quarantined: list[Slot] = []
        self._alive: set[Slot] = set()
        self._returned: deque[Slot] = deque()  # filled by finalizers, which may run anywhere and so must not lock
        self._pid = os.getpid()
        self._closed = False

    def take(self, byte_size: int) -> tuple[Slot, npt.NDArray[np.uint8]]:
        """Take a slot with this many bytes of data, and its memory.

        The slot is given back by itself when the memory, and every array made from it, is gone.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left.
        ClosedError
            The pool was closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this client")
            slot = self._take_idle(byte_size) or self._make(byte_size)
        memory = slot.memory()
        weakref.finalize(memory, self._returned.append, slot).atexit = False
        return slot, memory

    def close(self) -> None:
        """Remove all slots. Arrays over them stay valid.

        In a forked child it does nothing: the slots are the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for slot in list(self._alive):
                self._destroy(slot)

    def _take_idle(self, byte_size: int) -> Slot | None:
        self._sort_returned()
        fitting = [slot for slot in self._idle if slot.capacity >= byte_size]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.capacity)
        self._idle.remove(slot)
        return slot

    def _sort_returned(self) -> None:
        returned = self._quarantined
        self._quarantined = []
        while self._returned:
            returned.append(self._returned.popleft())
        for slot in returned:
            if slot not in self._alive:
                continue
            if slot.is_in_doubt and not slot.reclaim():
                self._quarantined.append(slot)
            else:
                self._idle.append(slot)

    def _make(self, byte_size: int) -> Slot:
        if self._idle:  # all of them too small: the largest makes room, so that the pool holds no more slots than calls
            self._destroy(max(self._idle, key=lambda slot: slot.capacity))
        region = ManagedRegion.create(byte_size, access=self._access)
        if self._prefault:
            region.segment.prefault()
        slot = Slot(region)
        self._alive.add(slot)
        return slot

    def _destroy(self, slot: Slot) -> None:
        if slot in self._alive:
            self._alive.remove(slot)
            if slot in self._idle:
                self._idle.remove(slot)
            slot.destroy()

    @property
    def quarantined_count(self) -> int:
        """How many slots wait for a model to be done with them."""
        with self._lock:
            self._sort_returned()
            return len(self._quarantined)
