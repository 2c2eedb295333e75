"""Slots: the memory of one call at a time, and what is known of its use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dtypes import BYTES
from ..errors import ClosedError, PeerError
from ..memory.cuda.events import EventListener
from ..memory.managed import ManagedRegion
from ..memory.segment import Access
from ..protocol.descriptor import CudaRegionClaim, RegionClaim, SystemRegionClaim
from ..protocol.region_layout import SlotRecord
from ..protocol.results import Event, parse_events
from .plan import CallPlan
from .space import DeviceSpace, HostSpace, Space

__all__ = ["Slot", "Turn"]

_BYTE: Final = np.dtype(np.uint8)

Bury = Callable[[int, Iterable[DeviceSpace]], None]


class Turn:
    """One slot record of a slot, through which one request at a time is fenced.

    Attributes
    ----------
    index : int
        Of the record in its region.
    generation : int
        Of the request that was sent last; 0 before the first.
    is_in_doubt : bool
        Whether a request got no answer, so that a model may be executing it, or may begin to.
    kept : object
        What the call that was here last keeps for the next one like it.
    """

    __slots__ = ("_record", "_region", "generation", "index", "is_in_doubt", "kept")

    def __init__(self, region: ManagedRegion, index: int) -> None:
        self._region = region
        self._record: SlotRecord | None = region.record(index)
        self.index = index
        self.generation = 0
        self.is_in_doubt = False
        self.kept: Any = None

    @property
    def record(self) -> SlotRecord:
        """The record, which keeps the memory mapped; raises ClosedError once the slot is destroyed."""
        if self._record is None:
            raise ClosedError("this client")
        return self._record

    def forget(self) -> None:
        """Let go of the memory, when the slot is destroyed."""
        self._record = None
        self.kept = None

    def advance(self) -> int:
        """Begin the next generation and return it."""
        self.generation += 1
        self.record.generation = self.generation
        return self.generation

    @property
    def is_started(self) -> bool:
        """Whether the model has begun with this generation; True once the slot is destroyed, when nobody knows."""
        return self._record is None or self._record.started == self.generation

    @property
    def is_completed(self) -> bool:
        """Whether the model has finished with this generation, well or not; False once the slot is destroyed."""
        return self._record is not None and self._record.completed == self.generation

    def reclaim(self) -> bool:
        """Make sure that no request that was ever sent will touch the slot again. Return whether that is so now.

        Holding the lease shows that no model executes here; the generation that is raised meanwhile makes every
        request that is still on its way a stale one, which is refused when it arrives. Once the slot is destroyed, that
        cannot be done any more.
        """
        if self._record is None:
            return False
        lease = self._region.lease(self.index)
        if not lease.take_back():
            return False
        try:
            self.advance()
        finally:
            lease.give_back()
        self.is_in_doubt = False
        return True


class Slot:
    """A managed region that serves one call at a time; with several turns if the call is several requests.

    Attributes
    ----------
    byte_size : int
        Of the whole region.
    data_offset : int
        Where the data begins in it.
    capacity : int
        Bytes of data.
    turns : tuple of Turn
    is_spoiled : bool
        Whether it must not be used again: something unfenced may still write to it, or no model can open it.
    is_registered : bool
        Whether the server may know it.
    slab : object
        How its turns were shared out to calls the last time.
    device_spaces : dict of int to DeviceSpace
        What it has on GPUs.
    """

    __slots__ = (
        "_bury",
        "_host_space",
        "_region",
        "byte_size",
        "capacity",
        "data_offset",
        "device_spaces",
        "is_registered",
        "is_spoiled",
        "slab",
        "turns",
    )

    def __init__(self, byte_size: int, turn_count: int, access: Access) -> None:
        self._region = ManagedRegion.create(byte_size, turn_count, access)
        self.byte_size = self._region.header.byte_size
        self.data_offset = self._region.data_offset
        self.capacity = self.byte_size - self.data_offset
        self.turns = tuple(Turn(self._region, index) for index in range(turn_count))
        self.is_spoiled = False
        self.is_registered = False
        self.slab: Any = None
        self.device_spaces: dict[int, DeviceSpace] = {}
        self._host_space = HostSpace(self.data_offset, self.byte_size)
        self._bury: Bury | None = None

    @property
    def key(self) -> str:
        """The name of its shared memory."""
        return self._region.segment.key

    @property
    def is_in_doubt(self) -> bool:
        """Whether a model may be executing in it."""
        for turn in self.turns:  # noqa: SIM110  # for every call; a generator would cost more than the answer
            if turn.is_in_doubt:
                return True
        return False

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return the whole region as bytes. Each call returns an array of its own."""
        return self._region.bytes()

    def input_arrays(self, plan: CallPlan, memory: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Return arrays where the inputs of a call lie, of strings as bytes; ``memory`` is the whole region."""
        spaces = self.spaces(plan.devices)
        arrays = {}
        for name, span in plan.inputs.items():
            dtype, shape = (_BYTE, (span.byte_size,)) if span.dtype is BYTES else (span.dtype.numpy, span.shape)
            space = spaces[span.region]
            arrays[name] = space.array_at(memory, space.begin + span.offset, dtype, shape)
        return arrays

    def add_device(self, device: int, space: DeviceSpace, bury: Bury) -> None:
        """Add memory on a GPU; ``bury`` takes it, and the region's descriptor, when the slot is destroyed."""
        self.device_spaces[device] = space
        self._bury = bury

    @property
    def listener(self) -> EventListener:
        """Waits for what models do on GPUs; raises PeerError if the slot has nothing there."""
        for space in self.device_spaces.values():
            return space.listener
        raise PeerError("the model's results break the protocol: an event for a call without memory on a GPU")

    @property
    def events(self) -> list[Event]:
        """What must have happened before no model's GPU works in it any more: models may leave that to their clients.

        Raises
        ------
        PeerError
            A model's results are not what protocol v1 says.
        """
        texts = [turn.record.results() for turn in self.turns if turn.generation]
        return [event for text in texts for event in parse_events(text)]

    def spaces(self, devices: Iterable[int]) -> tuple[Space, ...]:
        """Return the slot's memories in the order of a plan's regions."""
        return self._host_space, *[self.device_spaces[device] for device in devices]

    def claims(self, turn: Turn, devices: Iterable[int]) -> tuple[RegionClaim, ...]:
        """Return what a descriptor says of the slot's memories, in the order of a plan's regions."""
        token = self._region.header.token.hex()
        allocations = [self.device_spaces[device].allocation for device in devices]
        return (
            SystemRegionClaim(self.key, self.byte_size, token, turn.index),
            *[CudaRegionClaim(each.handle, each.byte_size, each.device_uuid, 0) for each in allocations],
        )

    def reclaim(self) -> bool:
        """Make sure that no request will touch the slot again. Return whether that is so now."""
        reclaimed = [turn.reclaim() for turn in self.turns if turn.is_in_doubt]
        return all(reclaimed)

    def prefault(self) -> None:
        """Enter its memory into this process' page tables."""
        self._region.segment.prefault()

    def forsake(self) -> None:
        """Let go of the parent's descriptor in a forked child. The name, and the lease, stay the parent's."""
        self.device_spaces = {}
        self._close()

    def destroy(self) -> None:
        """Remove the name. The memory goes with the last array, here or in the model. Twice is fine."""
        self._region.segment.unlink()
        if self._bury is not None and self.device_spaces:
            self._bury(os.dup(self._region.segment.fileno()), self.device_spaces.values())
            self.device_spaces = {}
        self._close()

    def _close(self) -> None:
        self.slab = None
        for turn in self.turns:
            turn.forget()
        self._region.close()
