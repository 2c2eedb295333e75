"""Row blocks: regions of several slots, one for each call, in which the calls' tensors follow one another.

A model that serves several of these calls as one batch then has one array over all their rows, without a copy. Each
call holds the block's memory, so that the block goes back to its pool by itself when its last call is over.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from .slot import FREE, SPOILED, Memory, Slot, SlotRegion

__all__ = ["Row", "RowBlocks"]

Layout = TypeVar("Layout")


@dataclass(frozen=True, slots=True)
class Row(Generic[Layout]):
    """One call's part of a block, in use while ``memory``, or an array made from it, lives."""

    region: SlotRegion
    slot: Slot
    layout: Layout  # where in the region its tensors lie
    memory: Memory


class _Block(Generic[Layout]):
    """One region, and which of its rows are in use."""

    def __init__(self, region: SlotRegion, memory: Memory, layouts: list[Layout]) -> None:
        self._region = region
        self.memory = weakref.ref(memory)  # dead once no call uses the block
        self._layouts = layouts
        self._users: list[weakref.ref[Memory] | None] = [None] * len(layouts)

    def take(self) -> Row[Layout] | None:
        """Take the first free row, so that calls lie side by side; None if all are taken, or the block is gone."""
        whole = self.memory()
        if whole is None or self._region.slots[0].state == SPOILED:
            return None
        for index, user in enumerate(self._users):
            slot = self._region.slots[index]
            if (user is None or user() is None) and (slot.state == FREE or slot.reclaim()):
                # NumPy views refer to the first array in their chain, so each row needs a first array of its own.
                memory: Memory = np.frombuffer(whole.data, np.uint8)
                self._users[index] = weakref.ref(memory)
                return Row(self._region, slot, self._layouts[index], memory)
        return None


class RowBlocks(Generic[Layout]):
    """The row blocks of one model's calls. Thread-safe. Calls that can share a block have equal keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, list[_Block[Layout]]] = {}
        self.together: Hashable = None  # the key of the last calls that came side by side; the next call begins a block

    def take(self, key: Hashable) -> Row[Layout] | None:
        """Return a free row of a block that is in use already."""
        with self._lock:
            rows = (block.take() for block in self._blocks.get(key, ()))
            row = next((row for row in rows if row is not None), None)
            if row is not None and row.slot.index:  # a call in the first row may have come alone
                self.together = key
            return row

    def begin(self, key: Hashable, region: SlotRegion, memory: Memory, layouts: list[Layout]) -> None:
        """Make a block of a region with as many slots as there are layouts; it lives as long as ``memory``."""
        with self._lock:
            alive = ((each, [it for it in blocks if it.memory() is not None]) for each, blocks in self._blocks.items())
            self._blocks = dict(filter(operator.itemgetter(1), alive))
            self._blocks.setdefault(key, []).append(_Block(region, memory, layouts))
