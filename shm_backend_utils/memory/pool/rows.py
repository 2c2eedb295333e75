"""Row blocks: regions of several slots, each for one call, whose tensors follow one another from call to call.

A model that serves several of these calls as one batch then has one array over all their rows, without a copy. Each
call holds the block's memory, so that the block goes back to its pool by itself when the last of its calls is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .slot import Slot, SlotRegion

__all__ = ["Row", "RowBlocks"]

Memory = npt.NDArray[np.uint8]
Layout = TypeVar("Layout")

_MAX_KEYS: Final = 256


@dataclass(frozen=True, slots=True)
class Row(Generic[Layout]):
    """One call's part of a block, in use while this very array of the whole region's memory, or one made from it,
    lives.
    """

    region: SlotRegion
    slot: Slot
    layout: Layout  # where in the region its tensors lie
    memory: Memory


class _Block(Generic[Layout]):
    """One region, and which of its rows are in use."""

    def __init__(self, region: SlotRegion, memory: Memory, layouts: list[Layout]) -> None:
        self._region = region
        self._memory = weakref.ref(memory)
        self._layouts = layouts
        self._users: list[weakref.ref[Memory] | None] = [None] * len(layouts)

    def take(self) -> Row[Layout] | None:
        """Take the first free row, so that calls lie side by side; None if there is none, or the block is gone."""
        whole = self._memory()
        if whole is None or self._region.is_spoiled:
            return None
        for index, user in enumerate(self._users):
            slot = self._region.slots[index]
            if (user is None or user() is None) and (not slot.is_in_doubt or slot.reclaim()):
                # NumPy has arrays keep the first of a chain of arrays, and this one must be told from the others.
                memory: Memory = np.frombuffer(whole.data, np.uint8)
                self._users[index] = weakref.ref(memory)
                return Row(self._region, slot, self._layouts[index], memory)
        return None

    @property
    def is_gone(self) -> bool:
        """Whether no call uses it any more."""
        return self._memory() is None


class _Calls(Generic[Layout]):
    """What is known of calls that are alike."""

    def __init__(self) -> None:
        self.blocks: list[_Block[Layout]] = []
        self.alone: weakref.ref[Memory] | None = None  # the memory of the last one that got no row
        self.come_together = False


class RowBlocks(Generic[Layout]):
    """The row blocks of one client. Thread-safe.

    Who makes one call after another needs no block: the first call at a time gets a region of its own. Calls that came
    side by side the last time begin with a block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Hashable, _Calls[Layout]] = {}

    def take(self, key: Hashable) -> Row[Layout] | None:
        """Return a free row of a block that is in use already; ``key`` is equal for calls that are alike."""
        with self._lock:
            calls = self._calls.get(key)
            if calls is None:
                return None
            for block in calls.blocks:
                row = block.take()
                if row is not None:
                    calls.come_together = True
                    return row
        return None

    def is_wanted(self, key: Hashable) -> bool:
        """Return whether a call shall begin a block: another one like it is under way, or was the last time."""
        with self._lock:
            calls = self._calls.get(key)
            if calls is None:
                return False
            others = any(not block.is_gone for block in calls.blocks)
            others = others or (calls.alone is not None and calls.alone() is not None)
            wanted = others or calls.come_together
            calls.come_together = others
            return wanted

    def expect(self, key: Hashable) -> None:
        """Have the next call begin a block: others like it will come."""
        with self._lock:
            self._calls_of(key).come_together = True

    def note_alone(self, key: Hashable, memory: Memory) -> None:
        """Take note of a call that has a region of its own."""
        with self._lock:
            self._calls_of(key).alone = weakref.ref(memory)

    def begin(self, key: Hashable, region: SlotRegion, memory: Memory, layouts: list[Layout]) -> Row[Layout]:
        """Make a block of a region with as many slots as there are layouts, and return its first row."""
        block = _Block(region, memory, layouts)
        with self._lock:
            calls = self._calls_of(key)
            calls.blocks = [each for each in calls.blocks if not each.is_gone]
            calls.blocks.append(block)
            row = block.take()
        assert row is not None
        return row

    def _calls_of(self, key: Hashable) -> _Calls[Layout]:
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= _MAX_KEYS:  # what is forgotten is only where calls might lie side by side
                self._calls.clear()
            calls = self._calls[key] = _Calls()
        return calls
