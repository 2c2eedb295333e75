"""Which slots there are, and in what state each is. No locks: a pool adds them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from .origin import Origin
from .slot import Slot

__all__ = ["Shelf"]


class Shelf:
    """Slots up to a budget.

    Attributes
    ----------
    max_bytes : int
        The budget.
    byte_size : int
        Of all slots; those that are promised but not made yet are included.
    held : dict of Slot to Origin
        In use, by whom.
    idle : dict of Slot to float
        Free, since when by ``time.monotonic()``; the longest idle one first.
    quarantined : list of Slot
        Given back, but a model may still be executing there.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.byte_size = 0
        self.held: dict[Slot, Origin] = {}
        self.idle: dict[Slot, float] = {}
        self.quarantined: list[Slot] = []
        self._groups: dict[Slot, str] = {}
        self._unregistered: deque[str] = deque()

    def add(self, slot: Slot, group: str, origin: Origin) -> None:
        """Add a new slot, which is held. Its size was promised before."""
        self._groups[slot] = group
        self.held[slot] = origin

    def take(self, data_size: int, turn_count: int, group: str, origin: Origin) -> Slot | None:
        """Take the smallest idle slot of the group with so many bytes of data; return None if there is none.

        Of several, the one that was used last: the processor still has some of it in its caches.
        """
        best: Slot | None = None
        for slot in reversed(self.idle):
            fits = slot.capacity >= data_size and len(slot.turns) >= turn_count and self._groups[slot] == group
            if fits and (best is None or slot.byte_size < best.byte_size):
                best = slot
        if best is not None:
            del self.idle[best]
            self.held[best] = origin
        return best

    def promise(self, byte_size: int, group: str) -> list[Slot] | None:
        """Make room for a new slot; return those that must be destroyed for it, or None if there cannot be enough.

        An idle one of the same group, which was too small, makes room first: there are no more slots than calls.
        """
        victims = sorted(self.idle, key=lambda slot: (self._groups[slot] != group, self.idle[slot]))
        free = self.max_bytes - self.byte_size
        if free + sum(slot.byte_size for slot in victims) < byte_size:
            return None
        evicted: list[Slot] = []
        for slot in victims:
            is_too_small_a_one = self._groups[slot] == group and not evicted
            if byte_size <= self.max_bytes - self.byte_size and not is_too_small_a_one:
                break
            self._forget(slot)
            evicted.append(slot)
        self.byte_size += byte_size
        return evicted

    def unpromise(self, byte_size: int) -> None:
        """Take back a promise that nobody made use of."""
        self.byte_size -= byte_size

    def put_back(self, returned: Iterable[Slot]) -> None:
        """Sort slots that are no longer held, and those in quarantine, by what can be done with them now."""
        waiting, self.quarantined = self.quarantined, []
        now = time.monotonic()
        for slot in (*waiting, *returned):
            if slot not in self._groups:
                continue  # the pool was closed meanwhile
            self.held.pop(slot, None)
            if slot.is_spoiled:
                self.destroy([slot])
            elif slot.is_in_doubt and not slot.reclaim():
                self.quarantined.append(slot)
            else:
                self.idle[slot] = now

    def idle_before(self, moment: float) -> list[Slot]:
        """Return the slots that have been idle since before a moment."""
        return [slot for slot, since in self.idle.items() if since < moment]

    def everything(self) -> list[Slot]:
        """Return all slots."""
        return list(self._groups)

    def destroy(self, slots: Iterable[Slot]) -> None:
        """Remove slots, and their names."""
        for slot in slots:
            self._forget(slot)
            self.bury([slot])

    def bury(self, forgotten: Iterable[Slot]) -> None:
        """Remove the names of slots that the shelf has forgotten already. Needs no lock.

        A slot's name goes before it is unregistered: what the server registers later than that, it cannot find.
        """
        for slot in forgotten:
            slot.destroy()
            if slot.is_registered:
                self._unregistered.append(slot.key)

    def forsake(self) -> None:
        """Forget every slot, in a forked child: they are the parent's."""
        for slot in self.everything():
            slot.forsake()
        self._groups.clear()
        self.held.clear()
        self.idle.clear()
        self.quarantined.clear()

    def take_unregistered(self) -> list[str]:
        """Return the keys of registered slots that were destroyed since the last time: to be unregistered."""
        keys = []
        while self._unregistered:
            keys.append(self._unregistered.popleft())
        return keys

    def __str__(self) -> str:
        holders = Counter(str(origin) for origin in self.held.values())
        by_whom = "; ".join(f"{count} by {origin}" for origin, count in holders.most_common(5))
        return (
            f"{len(self.held)} slots are held, {self.byte_size} of {self.max_bytes} bytes"
            f"{': ' if by_whom else ''}{by_whom}; {len(self.quarantined)} more are in quarantine"
        )

    def _forget(self, slot: Slot) -> None:
        self.byte_size -= slot.byte_size
        self.idle.pop(slot, None)
        self.held.pop(slot, None)
        if slot in self.quarantined:
            self.quarantined.remove(slot)
        del self._groups[slot]
