"""Slots on the side of their owner: the records of requests, the slots' states, and the regions that hold them.

========  =============================================================================================================
free      No process writes to the slot. A request may go out, or the pool may hand the slot out again. Only a GPU may
          still work there, as :attr:`Slot.is_at_rest` shows: calls with memory on GPUs wait for that first.
sent      A request went out, and its answer has not come: a model executes the request, or may begin to. The client
          must reclaim the slot before any other use.
spoiled   No call uses the slot's region again. The pool destroys the region when it is given back.
========  =============================================================================================================

A slot that a call has taken is free before its request goes out, and again after the answer: only the pool knows
which call has it.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ...errors import ClosedError
from ...protocol.layout import GENERATION, SlotRecord
from ...protocol.parameters import SlotAddress
from .. import locks
from ..descriptors import Access, Descriptor
from ..managed import ManagedRegion, RegionKind

__all__ = [
    "AFTER",
    "FREE",
    "SENT",
    "SPOILED",
    "Event",
    "Memory",
    "Parts",
    "Slot",
    "SlotRegion",
    "State",
    "is_left",
    "make_parts",
]

Memory = npt.NDArray[np.uint8]  # a whole region, which is given back when this array and all views of it are gone

State = Literal["free", "sent", "spoiled"]
Event = Literal["request", "answer", "reclaim", "refusal", "unfenced", "lost"]

FREE: Final = "free"
SENT: Final = "sent"
SPOILED: Final = "spoiled"

AFTER: Final[Mapping[Event, Mapping[State, State]]] = {
    "request": {FREE: SENT, SPOILED: SPOILED},
    # The model has completed the request, or leaves that to its GPU. After an error of the server, the client must
    # reclaim the slot instead.
    "answer": {SENT: FREE, SPOILED: SPOILED},
    # No model held the lease, and the client raised the generation: models refuse a late request.
    "reclaim": {SENT: FREE, SPOILED: SPOILED},
    # A model, or the server, cannot open the region.
    "refusal": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
    # No answer came to a request that names no slot: no generation keeps the model from writing later.
    "unfenced": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
    # A model died while its GPU was at work there, or memory on a GPU was only partly made.
    "lost": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
}
"""The state after an event, by the state before: this alone decides whether a slot may be used again.

Other transitions cannot happen.
"""


class Slot:
    """One slot of a region: its state, by :data:`AFTER`, and the generations of its requests."""

    __slots__ = (
        "_record",
        "_region",
        "address_pattern",
        "generation",
        "index",
        "kept",
        "messages",
        "results",
        "sent",
        "state",
    )

    def __init__(self, region: ManagedRegion, index: int) -> None:
        self._region = region
        self.index = index
        self.bind()
        self.sent = self.generation = 0  # of the last request; a fence raises `generation` only
        self.state: State = FREE
        self.kept: Sequence[object] = ()  # other objects that the request may use; kept until this slot is free

    def bind(self) -> None:
        """Take over the region's present record and address, which change when the region grows."""
        # The last short call's model, outputs and rows, with a function that makes its messages for this address.
        self.messages: tuple[object, Callable[[int], Any]] | None = None
        self._record: SlotRecord | None = self._region.record(self.index)
        # The model's half of the record, to be copied out all at once; empty once the region is destroyed.
        self.results = self._record.results
        # The value of shm_slot, with %s for the model's name: nothing else in an address has a percent sign.
        self.address_pattern = str(
            SlotAddress("%s", self._region.segment.key, self._region.header.token.hex(), self.index)
        )

    @property
    def record(self) -> SlotRecord:
        """The record, which keeps the memory mapped; raises ClosedError once the region is destroyed."""
        if self._record is None:
            raise ClosedError("this client")
        return self._record

    def begin(self, contents: bytes) -> int:
        """Write the encoded table of the next request, and return its generation."""
        record = self._record
        if record is None:
            raise ClosedError("this client")
        self.state = AFTER["request"][self.state]
        generation = self.sent = self.generation = self.generation + 1
        record.table[: len(contents)] = contents
        record.client_words[GENERATION] = generation
        return generation

    @property
    def record_offset(self) -> int:
        """Where the record begins in the region."""
        return self._region.record_offset(self.index)

    @property
    def is_completed(self) -> bool:
        """Whether a model has finished this generation, successfully or not; False once the region is destroyed."""
        return self._record is not None and self._record.completed == self.generation

    @property
    def is_at_rest(self) -> bool:
        """Whether models, and their GPUs, have finished all that they started; ClosedError if the region is gone."""
        return self.record.is_at_rest

    @property
    def was_left(self) -> bool:
        """Whether a model died before it, or its GPU, had finished a request; False once the region is destroyed."""
        return self._record is not None and is_left(self._region.segment.fileno(), self.record_offset, self._record)

    def fence(self) -> bool:
        """Fence the slot: make earlier requests stale; return False if a model still uses it, or the region is gone."""
        if self._record is None:
            return False
        lease = self._region.lease(self.index)
        if not lease.take_back():
            return False
        try:
            self._raise_generation()
        finally:
            lease.give_back()
        return True

    def fence_unstarted(self) -> bool:
        """Fence the slot if no model has started its request; return whether that request can never start."""
        record, sent = self._record, self.sent
        return record is not None and record.started != sent and self.fence() and record.started != sent

    def reclaim(self) -> bool:
        """Fence the slot and make it free; return whether that succeeded."""
        if not self.fence():
            return False
        self.become_free("reclaim")
        return True

    def become_free(self, event: Literal["answer", "reclaim"]) -> None:
        """Record that a request is over, and let go of the objects that were kept for it."""
        self.state = AFTER[event][self.state]
        self.kept = ()

    def give_up(self) -> None:
        """End a request that no call waits for: free the slot if a model completed it, else make the request stale."""
        if self.state == SENT:
            if self.is_completed:
                self.become_free("answer")
            elif self._record is not None:
                self._raise_generation()

    def _raise_generation(self) -> None:
        assert self._record is not None
        self.generation += 1
        self._record.generation = self.generation

    def release_frame(self, number: int) -> None:
        """Let the model overwrite frame ``number``, which the client has finished reading."""
        if self._record is not None:
            self._record.generation = number

    def forget(self) -> None:
        """Let go of the memory, when the region is destroyed."""
        self._record = None
        self.results = memoryview(b"")
        self.kept = ()


def is_left(fd: int, offset: int, record: SlotRecord) -> bool:
    """Return whether a request was started in a slot, and no living model will finish it."""
    is_in_use = locks.is_slot_in_use(fd, offset)  # read first: models write `completed` before they unlock
    return not is_in_use and not record.is_at_rest


class Parts:
    """The state that all parts of one region share."""

    __slots__ = ("parts", "slots")

    def __init__(self) -> None:
        self.parts: set[int] = set()  # the first slot of each existing part
        self.slots: list[Slot] = []  # of all parts: spoiling one part spoils the others


class SlotRegion:
    """A managed region that this process made, or a part of one, with its slots."""

    __slots__ = (
        "_region",
        "borrowed",
        "buffer",
        "byte_size",
        "capacity",
        "data_end",
        "data_offset",
        "device_memory",
        "growing",
        "holder",
        "idle_since",
        "is_registered",
        "kind",
        "on_destroy",
        "shelf",
        "slots",
        "whole",
        "worked_on",
    )

    def __init__(
        self,
        byte_size: int,
        slot_count: int,
        record_byte_size: int,
        access: Access,
        deadline: float = math.inf,
        kind: RegionKind = RegionKind.SYSTEM,
    ) -> None:
        region = ManagedRegion.create(byte_size, slot_count, access, record_byte_size, deadline, kind)
        self._take(region, kind, range(slot_count), region.data_offset, region.header.byte_size, Parts())

    def _take(self, region: ManagedRegion, kind: RegionKind, slots: range, begin: int, end: int, whole: Parts) -> None:
        """Make this object the part of a region that has these slots and the data between two offsets."""
        self._region = region
        self.kind = kind
        self.byte_size = region.header.byte_size  # of the whole region
        self.data_offset = begin
        self.data_end = end
        self.capacity = end - begin  # bytes of data
        self.buffer = region.buffer()
        self.slots = tuple([Slot(region, index) for index in slots])
        self.whole = whole
        whole.parts.add(slots[0])
        whole.slots += self.slots
        self.is_registered = False  # whether the server may know the region by its key
        self.device_memory: dict[int, Any] = {}  # on GPUs, by device
        # Users' memory that the slot fences, kept until no model uses it. A region with such memory serves one call.
        self.borrowed: list[Any] = []
        # The GPU streams that users of this memory named, and on which they may still read results. None is among them
        # if a user named no stream.
        self.worked_on: set[Any] = set()
        # destroy() calls this with the region and a duplicate of the region's descriptor, which the callee then owns.
        self.on_destroy: Callable[[SlotRegion, Descriptor], None] | None = None
        self.holder: object = None  # the object that asked for the region; None if no call has it
        self.growing = threading.Lock()  # a cancelled call may still be growing it
        self.idle_since = 0.0  # by time.monotonic()
        self.shelf: deque[SlotRegion] | None = None  # where its pool keeps it while no call has it

    def grow(self, byte_size: int, deadline: float) -> None:
        """Enlarge the region, and keep its contents; raises like :meth:`.MappedSegment.grow`."""
        self._region.grow(byte_size, deadline)
        self.buffer = self._region.buffer()
        for slot in self.slots:
            slot.bind()
        self.data_end = self._region.header.byte_size
        self.capacity = self.data_end - self.data_offset
        self.byte_size = self.data_end  # last: after an earlier interrupt, the region counts as not grown

    @property
    def key(self) -> str:
        """The region's name in requests."""
        return self._region.segment.key

    @property
    def token(self) -> str:
        """The secret that requests name: 32 hexadecimal digits."""
        return self._region.header.token.hex()

    @property
    def state(self) -> State:
        """The worst state of its slots: spoiled (then all are), sent (a model may be at work in one), or free."""
        for slot in self.slots:  # a plain loop: every call runs this, and a generator would take longer
            if slot.state != FREE:
                return slot.state
        return FREE

    @property
    def is_spent(self) -> bool:
        """Whether the pool must destroy the region instead of using it again."""
        return self.state == SPOILED or bool(self.borrowed)

    def spoil(self, event: Literal["refusal", "unfenced", "lost"]) -> None:
        """Mark the region, with all its parts, as one that is never used again, for the given reason."""
        for slot in self.whole.slots:
            slot.state = AFTER[event][slot.state]

    def reclaim(self) -> bool:
        """Reclaim every slot that a request may still use; return whether that succeeded for all of these slots."""
        reclaimed = [slot.reclaim() for slot in self.slots if slot.state == SENT or (slot.kept and slot.state != FREE)]
        return all(reclaimed)

    @property
    def fd(self) -> int:
        """The region's descriptor, for checks of locks; raises ClosedError once the region is destroyed."""
        return self._region.segment.fileno()

    @property
    def managed(self) -> ManagedRegion:
        """The region itself, of which this object may be a part."""
        return self._region

    def prefault(self, deadline: float = math.inf) -> None:
        """Enter the region's memory into this process' page tables, as far as the deadline allows."""
        self._region.segment.prefault(deadline)

    def after_fork(self) -> None:
        """Let go of the parent's descriptor in a forked child. The name, and the lease, stay the parent's."""
        self.device_memory = {}
        self._close()

    def destroy(self) -> None:
        """Remove the region if this is its last part. The memory stays until the last array is gone. Twice is fine."""
        self.whole.parts.discard(self.slots[0].index)
        if self.whole.parts:
            self._let_go()
            return
        self._region.segment.unlink()
        if self.on_destroy is not None:
            self.on_destroy(self, Descriptor(os.dup, self._region.segment.fileno()))
            self.on_destroy = None
        self._close()

    def _close(self) -> None:
        self._let_go()
        self._region.close()

    def _let_go(self) -> None:
        for slot in self.slots:
            slot.forget()
        self.buffer = memoryview(b"")


def make_parts(
    count: int, byte_size: int, record_byte_size: int, access: Access, deadline: float, kind: RegionKind
) -> list[SlotRegion]:
    """Make a region of several parts with one slot each, for as many calls; the end of the last part removes it."""
    region = ManagedRegion.create(count * byte_size, count, access, record_byte_size, deadline, kind)
    whole, begin = Parts(), region.data_offset
    size = (region.header.byte_size - begin) // count
    parts = [SlotRegion.__new__(SlotRegion) for _ in range(count)]
    for index, part in enumerate(parts):
        part._take(region, kind, range(index, index + 1), begin + index * size, begin + (index + 1) * size, whole)
    return parts
