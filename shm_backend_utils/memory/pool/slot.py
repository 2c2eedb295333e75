"""Slots as their owner has them: records that requests go out in, and the regions that hold them."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import ClosedError
from ...protocol.address import SlotAddress
from ...protocol.layout import GENERATION, SlotRecord
from .. import locks
from ..access import Access
from ..descriptors import Descriptor
from ..kinds import RegionKind
from ..managed import ManagedRegion

__all__ = ["Slot", "SlotRegion", "Whole"]


class Slot:
    """One slot of a region: the generations of its requests, and whether a model may still be at work in it."""

    __slots__ = ("_record", "_region", "address_pattern", "annex", "generation", "index", "is_in_doubt", "results")

    def __init__(self, region: ManagedRegion, index: int) -> None:
        self._region = region
        self._record: SlotRecord | None = region.record(index)
        # The model's half of the record, to be copied out all at once; empty once the region is destroyed.
        self.results = self._record.results
        # The value of shm_slot, with %s for the model's name: nothing else in an address has a percent sign.
        self.address_pattern = str(SlotAddress("%s", region.segment.key, region.header.token.hex(), index))
        self.index = index
        self.generation = 0  # of the request that was sent last; 0 before the first
        self.is_in_doubt = False  # a request got no answer, so a model may execute it, or may begin to
        # Memory in another region that such a request may use as well. It is kept until the request is known to be
        # over: a late one would be executed, and write there too.
        self.annex: object = None

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
        generation = self.generation = self.generation + 1
        record.table[: len(contents)] = contents
        record.client_words[GENERATION] = generation
        return generation

    @property
    def record_offset(self) -> int:
        """Where the record begins in the region."""
        return self._region.record_offset(self.index)

    def may_begin(self, generation: int) -> bool:
        """Return whether a request of this generation may still begin: nobody has made it a stale one."""
        return self._record is not None and self.generation == generation

    @property
    def is_started(self) -> bool:
        """Whether a model has begun with this generation; True once the region is destroyed, when nobody knows."""
        return self._record is None or self._record.started == self.generation

    @property
    def is_completed(self) -> bool:
        """Whether a model has finished with this generation, well or not; False once the region is destroyed."""
        return self._record is not None and self._record.completed == self.generation

    @property
    def was_left(self) -> bool:
        """Whether a model has begun with a request here and never finished it; it is dead if the slot was reclaimed."""
        return self._record is not None and self._record.started != self._record.completed

    def reclaim(self) -> bool:
        """Make sure that no request that was ever sent will touch the slot again. Return whether that is so now.

        Holding the lease shows that no model executes here. The generation that is raised meanwhile makes every request
        that is still on its way a stale one, which is refused when it arrives.
        """
        if self._record is None:
            return False
        lease = self._region.lease(self.index)
        if not lease.take_back():
            return False
        try:
            self.generation += 1
            self._record.generation = self.generation
        finally:
            lease.give_back()
        self.is_in_doubt = False
        self.annex = None
        return True

    def give_up(self) -> None:
        """Make a request stale that was sent and has not begun, if it is not too late."""
        if self._record is not None:
            self.generation += 1
            self._record.generation = self.generation
            self.is_in_doubt = True

    def release_frame(self, number: int) -> None:
        """Let the model write here again; ``number`` is that of the frame that nobody reads any more.

        Nothing happens once the region is destroyed, nor in a forked child: the frame is the parent's.
        """
        if self._record is not None:
            self._record.generation = number

    def forget(self) -> None:
        """Let go of the memory, when the region is destroyed."""
        self._record = None
        self.results = memoryview(b"")
        self.annex = None


class Whole:
    """What all parts of one region share."""

    __slots__ = ("is_spoiled", "parts")

    def __init__(self, parts: set[int]) -> None:
        self.parts = parts  # the first slot of each part that there is
        self.is_spoiled = False  # as of a SlotRegion


class SlotRegion:
    """A managed region of this process' own, with its slots."""

    __slots__ = (
        "_region",
        "buffer",
        "byte_size",
        "capacity",
        "data_end",
        "data_offset",
        "device_memory",
        "holder",
        "idle_since",
        "is_registered",
        "kind",
        "lent",
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
        self._take(region, kind, range(slot_count), region.data_offset, region.header.byte_size)
        self.whole = Whole({0})  # shared with other parts of the same region; its own, unless it is a RegionPart

    def _take(self, region: ManagedRegion, kind: RegionKind, slots: range, begin: int, end: int) -> None:
        """Take these slots of a region, and its data between two offsets."""
        self._region = region
        self.kind = kind
        self.byte_size = region.header.byte_size  # of the whole region
        self.data_offset = begin
        self.data_end = end
        self.capacity = end - begin  # bytes of data
        self.buffer = region.buffer()
        self.slots = tuple([Slot(region, index) for index in slots])
        self.is_registered = False  # the server may know it by its key
        self.device_memory: dict[int, Any] = {}  # on GPUs, by device
        self.lent: list[Any] = []  # memory of users that its slot fences: it lives until no model uses it
        # The streams of GPUs on which users of its memory said that they work with it, and may still read results; None
        # among them where somebody did not say so.
        self.worked_on: set[Any] = set()
        # Takes another descriptor of the region, which it then owns.
        self.on_destroy: Callable[[Descriptor], None] | None = None
        self.holder: object = None  # None if nobody has it
        self.idle_since = 0.0  # by time.monotonic()
        self.shelf: deque[SlotRegion] | None = None  # where its pool keeps it while nobody has it

    @property
    def is_spoiled(self) -> bool:
        """Whether it must not be used again: something unfenced may still write to it, or no model can open it."""
        return self.whole.is_spoiled

    @is_spoiled.setter
    def is_spoiled(self, value: bool) -> None:
        self.whole.is_spoiled = value

    @property
    def key(self) -> str:
        """What requests call its memory."""
        return self._region.segment.key

    @property
    def token(self) -> str:
        """The secret that requests name: 32 hexadecimal digits."""
        return self._region.header.token.hex()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a model may be at work in one of its slots."""
        for slot in self.slots:  # noqa: SIM110  # for every call; a generator would cost more than the answer
            if slot.is_in_doubt:
                return True
        return False

    def reclaim(self) -> bool:
        """Make sure that no request will touch the region again. Return whether that is so now."""
        reclaimed = [slot.reclaim() for slot in self.slots if slot.is_in_doubt]
        return all(reclaimed)

    @property
    def fd(self) -> int:
        """Its descriptor, for looking at locks; raises ClosedError once it is destroyed."""
        return self._region.segment.fileno()

    @property
    def has_users(self) -> bool:
        """Whether a model has memory of a GPU mapped that a slot here fences; True once it is destroyed."""
        return self._region.segment.is_closed or locks.has_users(self.fd)

    def prefault(self, deadline: float = math.inf) -> None:
        """Enter its memory into this process' page tables, as much as can be until a moment."""
        self._region.segment.prefault(deadline)

    def forsake(self) -> None:
        """Let go of the parent's descriptor in a forked child. The name, and the lease, stay the parent's."""
        self.device_memory = {}
        self._close()

    def destroy(self) -> None:
        """Let nobody new open it. The memory goes with the last array, here or in a model. Twice is fine."""
        self._region.segment.unlink()
        on_destroy, self.on_destroy = self.on_destroy, None
        if on_destroy is not None:
            on_destroy(Descriptor(os.dup, self._region.segment.fileno()))
        self._close()

    def _close(self) -> None:
        self._let_go()
        self._region.close()

    def _let_go(self) -> None:
        for slot in self.slots:
            slot.forget()
        self.buffer = memoryview(b"")
