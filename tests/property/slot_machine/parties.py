"""A client's calls, and the models that execute them: each model maps memory by a description of its own."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes
from shm_backend_utils.errors import RegionGoneError, ReplayedRequestError, SlotInUseError, StaleRequestError
from shm_backend_utils.memory.locks import SharedLease, borrow
from shm_backend_utils.memory.pool.slot import AFTER, FREE, SENT, Slot, SlotRegion, State
from shm_backend_utils.model.mapping import mapped
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from tests.opened import open_region

UINT8 = dtypes.BY_NAME["UINT8"]
PART = 256
"""Bytes of the input, and of the output behind it."""

Bytes = npt.NDArray[np.uint8]


class Request:
    """What travels: which slot, and which of its generations."""

    def __init__(self, call: ClientCall) -> None:
        self.call = call
        self.key = call.region.key
        self.token = call.region.token
        self.generation = call.slot.generation


class ClientCall:
    """A call that has memory. ``arrays`` keep it; ``contents`` is what must be there."""

    def __init__(self, region: SlotRegion, memory: Bytes, value: int) -> None:
        self.region = region
        self.key = region.key
        self.slot: Slot = region.slots[0]
        self.value = value
        self.begin = region.data_offset
        self.arrays = [memory]
        self.is_sent = False
        self.is_over = False
        self.state: State = FREE
        memory[self.begin :] = value
        self.contents = bytes(memory[self.begin :])

    @property
    def is_held(self) -> bool:
        return bool(self.arrays)

    def check(self) -> None:
        """Compare every array with what must be in it; arrays are the whole memory, or its end."""
        for array in self.arrays:
            size = min(array.nbytes, len(self.contents))
            assert bytes(array[array.nbytes - size :]) == self.contents[len(self.contents) - size :]

    def send(self) -> Request:
        spans = {"X": InputSpan(UINT8, (PART,), 0, self.begin, PART)}
        self.is_sent = True
        self.state = AFTER["request"][self.state]
        self.slot.begin(table.encode(Table(spans, {"Y": OutputSpan(0, self.begin + PART, PART)})))
        return Request(self)

    def give_up(self) -> None:
        if self.state == SENT and self.slot.is_completed:
            self.state = AFTER["answer"][self.state]
        self.slot.give_up()

    def spoil(self, event: Literal["refusal", "unfenced", "lost"]) -> None:
        self.state = AFTER[event][self.state]
        self.region.spoil(event)

    def written(self, value: int) -> None:
        self.contents = self.contents[:PART] + bytes([value]) * PART + self.contents[2 * PART :]

    def receive(self) -> None:
        found = results.decode(bytes(self.slot.results), [self.region.byte_size])
        assert found.completed == self.slot.generation
        (place,) = found.outputs
        assert (place.name, place.offset, place.byte_size) == ("Y", self.begin + PART, PART)
        whole = self.arrays.pop()
        self.arrays = [whole[place.offset :], whole[place.offset + 1 :]]
        self.state = AFTER["answer"][self.state]
        self.slot.become_free("answer")
        self.is_over = True


class Work:
    """A request that a model executes; the slot's lease is held."""

    def __init__(self, model: Model, request: Request, slot: mapped.MappedSlot) -> None:
        self.model = model
        self.request = request
        self.slot = slot

    def write(self, value: int) -> None:
        memory = self.slot.memory.array
        begin = self.request.call.begin + PART
        memory[begin : begin + PART] = value

    def complete(self) -> None:
        begin = self.request.call.begin + PART
        self.slot.record.complete(
            self.request.generation, results.encode([OutputPlace("Y", UINT8, (PART,), 0, begin, PART, False)])
        )

    def end(self) -> None:
        self.slot.lease.give_back()


class Borrowed:
    """The memory of a request, as a second model has it that the first has called."""

    def __init__(self, request: Request, slot: mapped.MappedSlot, lease: SharedLease) -> None:
        self.request = request
        self.memory: Bytes = slot.memory.array
        self.lease = lease

    def write(self, value: int) -> None:
        begin = self.request.call.begin + PART
        self.memory[begin : begin + PART] = value


class Model:
    """A process that executes requests. It keeps what it has mapped, until it dies."""

    def __init__(self) -> None:
        self.slots: dict[str, mapped.MappedSlot] = {}

    def begin(self, request: Request) -> Work | str:
        try:
            slot = self._slot(request)
            slot.claim(request.generation)
        except ReplayedRequestError:
            return "replayed"
        except (RegionGoneError, SlotInUseError, StaleRequestError) as error:
            return type(error).__name__
        if slot.record.start(request.generation):
            return Work(self, request, slot)
        slot.lease.give_back()
        return "replayed"

    def borrow(self, request: Request) -> Borrowed | None:
        try:
            slot = self._slot(request)
        except RegionGoneError:
            return None
        managed: Any = slot.region.managed
        lease = borrow(managed.segment.fileno(), managed.record_offset(0))
        return None if lease is None else Borrowed(request, slot, lease)

    def die(self) -> None:
        self.slots.clear()

    def _slot(self, request: Request) -> mapped.MappedSlot:
        slot = self.slots.get(request.key)
        if slot is None:
            region = mapped.MappedRegion(open_region(request.key, request.token, "the request's region"))
            assert isinstance(region.memory, HostMemory)
            slot = self.slots[request.key] = mapped.MappedSlot(region, 0)
        return slot
