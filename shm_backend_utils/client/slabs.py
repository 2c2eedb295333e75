"""Slabs: slots of several turns, each for one call, whose tensors follow one another from call to call.

A model that serves several of these calls as one batch then has one array over all their rows, without a copy. A slab's
slot is the pool's own: the slab holds it while one of its turns is in use, and is kept in it until it is used again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from .berth import Berth
from .plan import CallPlan, rows_of
from .slot import Slot

__all__ = ["Slabs"]

Memory = npt.NDArray[np.uint8]

_MOST_REMEMBERED: Final = 256
_NO_MEMORY: Final[Memory] = np.empty(0, np.uint8)


class _Slab:
    """One slot, and which of its turns are free."""

    def __init__(self, slot: Slot, plan: CallPlan, whole: CallPlan) -> None:
        assert whole.batch_size is not None
        assert plan.batch_size is not None
        rows = plan.batch_size
        self.slot = slot
        self.whole = whole
        self.plan = plan
        self.parts = [rows_of(whole, begin, begin + rows, plan.signature) for begin in range(0, whole.batch_size, rows)]
        self.memory = _NO_MEMORY
        self.free: list[int] = []
        self.doubtful: list[int] = []
        self.is_shared = False

    def begin(self, memory: Memory) -> None:
        """Hold the slot: ``memory`` keeps it from being used otherwise."""
        self.memory = memory
        self.free = list(range(len(self.parts)))
        self.doubtful = []
        self.is_shared = False

    def take(self) -> int:
        """Take the first free turn."""
        self.is_shared |= not self.is_unused
        index = min(self.free)
        self.free.remove(index)
        return index

    @property
    def is_unused(self) -> bool:
        """Whether no call uses it."""
        return len(self.free) + len(self.doubtful) == len(self.parts)

    def put_back(self, index: int) -> None:
        """Take note that a turn is not in use any more."""
        turn = self.slot.turns[index]
        if turn.is_in_doubt and not turn.reclaim():
            self.doubtful.append(index)
        else:
            self.free.append(index)


class Slabs:
    """The slabs of one client that are in use. Thread-safe.

    Turns come back as slots do, in finalizers, which wait for no lock; see :class:`SlotPool`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[CallPlan, list[_Slab]] = {}
        self._returned: deque[tuple[_Slab, int]] = deque()
        self._watched: dict[int, tuple[weakref.ref[Memory], _Slab, int]] = {}
        self._shared: set[CallPlan] = set()

    def are_shared(self, plan: CallPlan) -> bool:
        """Return whether several of these calls were made side by side the last time, so that a slab is worth while."""
        return plan in self._shared

    def take(self, plan: CallPlan) -> Berth | None:
        """Return a turn of a slab that is in use already, if one is free: the first, so that calls lie side by side."""
        with self._lock:
            self._sort_returned()
            slabs = [slab for slab in self._used.get(plan, ()) if slab.free and not slab.slot.is_spoiled]
            berth = self._berth(slabs[0]) if slabs else None
        self._settle()
        return berth

    def begin(self, plan: CallPlan, whole: CallPlan, slot: Slot, memory: Memory) -> Berth:
        """Make a slab of a slot with enough turns, and return its first."""
        slab: _Slab | None = slot.slab
        if slab is None or slab.plan is not plan or slab.whole is not whole:
            slab = slot.slab = _Slab(slot, plan, whole)
        with self._lock:
            slab.begin(memory)
            self._used.setdefault(plan, []).append(slab)
            berth = self._berth(slab)
        self._settle()
        return berth

    def _berth(self, slab: _Slab) -> Berth:
        index = slab.take()
        # NumPy has arrays keep the first of a chain of arrays, and this one must be told from the slab's: a memoryview.
        memory: Memory = np.frombuffer(slab.memory.data, np.uint8)
        reference = weakref.ref(memory, self._give_back)
        self._watched[id(reference)] = reference, slab, index
        return Berth(slab.slot, slab.slot.turns[index], slab.parts[index], memory)

    def _give_back(self, memory: weakref.ref[Memory]) -> None:
        _, slab, index = self._watched.pop(id(memory))
        self._returned.append((slab, index))
        self._settle()

    def _settle(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_returned()
            finally:
                self._lock.release()

    def _sort_returned(self) -> None:
        while self._returned:
            slab, index = self._returned.popleft()
            slab.put_back(index)
            slabs = self._used.get(slab.plan, [])
            if slab in slabs and (slab.is_unused or slab.slot.is_spoiled):
                slabs.remove(slab)
                if not slabs:
                    del self._used[slab.plan]
                self._note(slab)
                slab.memory = _NO_MEMORY

    def _note(self, slab: _Slab) -> None:
        if not slab.is_shared:
            self._shared.discard(slab.plan)
        elif len(self._shared) < _MOST_REMEMBERED:
            self._shared.add(slab.plan)
