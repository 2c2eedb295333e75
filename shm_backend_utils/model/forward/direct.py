"""A request to another model on shared memory: on a slot of this model, and on the client's memory, which is lent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np

from ...dtypes import BYTES
from ...errors import NOT_OPENED, ClosedError, code_in
from ...gpu.instance import InstanceGpus
from ...memory.managed import array_at
from ...memory.pool.inventory import Need
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import AFTER, FREE, SENT, Slot
from ...model_spec import BATCH_CARRIER
from ...protocol import results
from ...protocol.call_layout import CallInput, lay_out
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim, LentRegionClaim, RegionClaim
from ...protocol.layout import data_offset
from ...protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from ...protocol.results import OutputPlace, broken_results, missing_output
from ...protocol.spans import InputSpan, OutputSpan, Table
from ...protocol.table import encode
from ...tensors.strings import Strings
from ...tensors.view import StringsView, TensorView
from ..mapping.memory import HostMemory, MappedMemory
from ..triton import TritonBackend
from .ordinary import Asked, Forwarding, Given

__all__ = ["DirectForwarding", "Lending", "LentMemory", "lendable"]


class LentMemory(NamedTuple):
    """Memory of the request that this model executes, which it can lend to another model."""

    claim: RegionClaim  # as in a table; the fence is the number of a region of this request
    memory: MappedMemory  # this process' mapping of the memory
    extents: tuple[tuple[int, int], ...]  # of the request's tensors; the request's slot fences nothing else


class Lending:
    """The further regions of a request to another model; ``own`` are the regions to lend, None to lend nothing."""

    def __init__(self, own: Sequence[LentMemory | None] | None, pool: SlotPool) -> None:
        self._own = own
        self.pool = pool
        self._numbers: dict[RegionClaim, int] = {}
        self.claims: list[RegionClaim] = []  # in the order of the table
        self.memories: list[MappedMemory] = []  # this process' mappings of the regions in claims
        self._lent_slots: list[Slot] = []  # of the pool's regions in claims

    def place_of(self, array: Any) -> tuple[int, int] | None:
        """Return the region and offset of a C-contiguous array; None if this model cannot lend the array's memory."""
        if self._own is None or not array.nbytes:
            return None
        for number, lent in enumerate(self._own):
            if lent is None:
                continue
            offset = lent.memory.offset_of(array)
            if offset is not None and any(begin <= offset <= end - array.nbytes for begin, end in lent.extents):
                return self._lend_own(number), offset
        if isinstance(array, np.ndarray) and array.flags.c_contiguous:
            return self._place_in_pool(array)
        return None

    def _place_in_pool(self, array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        address = array.__array_interface__["data"][0]
        for region, memory in self.pool.held():
            offset = address - memory.__array_interface__["data"][0]
            if 0 <= offset <= memory.nbytes - array.nbytes:
                claim = LentRegionClaim(region.key, region.byte_size, region.token, 0)
                self._lent_slots.append(region.slots[0])
                return self._lend(claim, HostMemory(memory)), offset
        return None

    def keep_from_use(self) -> None:
        """Let the pool use its lent regions again only when the borrower has given them back."""
        for slot in self._lent_slots:
            if slot.state == FREE:
                slot.state = AFTER["request"][FREE]

    def _lend_own(self, number: int) -> int:
        lent = None if self._own is None else self._own[number]
        assert lent is not None
        claim = lent.claim
        if isinstance(claim, CudaRegionClaim):
            fence = None if claim.fence is None else self._lend_own(claim.fence)
            claim = replace(claim, fence=fence, waits=False)  # this model does not wait for the other's GPU
        elif isinstance(claim, CudaDescriptorClaim):
            claim = replace(claim, fence=self._lend_own(claim.fence), waits=False)
        return self._lend(claim, lent.memory)

    def _lend(self, claim: RegionClaim, memory: MappedMemory) -> int:
        number = self._numbers.get(claim)
        if number is None:
            self.claims.append(claim)
            self.memories.append(memory)
            number = self._numbers[claim] = len(self.claims)
        return number


def lendable(
    slot: LentRegionClaim | None, table: Table, rooms: Mapping[str, OutputSpan], memories: Sequence[MappedMemory]
) -> list[LentMemory | None]:
    """Return the regions of a request that can be lent; ``slot`` is the claim of the region with the request's slot."""
    extents: list[list[tuple[int, int]]] = [[] for _ in memories]
    spans: list[InputSpan | OutputSpan] = [*table.inputs.values(), *rooms.values()]
    for span in spans:
        extents[span.region].append((span.offset, span.offset + span.byte_size))
    return [
        None if claim is None else LentMemory(claim, memory, tuple(its))
        for claim, memory, its in zip((slot, *table.regions), memories, extents, strict=True)
    ]


_GROUP: Final = "forward"
_BYTE: Final = np.dtype(np.uint8)
_BYTES_IN_RESPONSE: Final = "UINT8"  # the type of strings that come in the response, for lack of room


class DirectForwarding(Forwarding):
    """A request to a model that maps shared memory; tensors that :class:`Lending` cannot lend lie in a slot."""

    again: Callable[[], DirectForwarding] | None = None  # makes the same request in other memory, if possible

    def __init__(
        self,
        asked: Asked,
        backend: TritonBackend,
        arrays: InstanceGpus,
        learned: Mapping[str, int],
        lending: Lending,
    ) -> None:
        super().__init__(asked, backend, arrays)
        self._lending = lending
        other, given = asked.other, asked.inputs
        assert other is not None
        spec, record_size = other.spec, other.record_byte_size
        lent_inputs = {name: lending.place_of(each.array) for name, each in given.items()}
        targets = {name: hint for name, hint in asked.hints.items() if isinstance(hint, TensorView) and hint.writable}
        lent_outputs = {name: lending.place_of(target.array) for name, target in targets.items()}
        begin = data_offset(1, record_size)
        layout = lay_out(
            spec,
            {
                name: CallInput(each.dtype, each.shape, 0 if lent_inputs[name] else each.array.nbytes)
                for name, each in given.items()
            },
            {name: 0 if lent_outputs.get(name) else _hint_of(asked.hints.get(name)) for name in asked.names},
            begin,
            learned=learned,
            most_rows=spec.max_batch_size,
        )
        inputs, rooms = dict(layout.table.inputs), dict(layout.table.outputs)
        for name, place in lent_inputs.items():
            if place is not None:
                each = given[name]
                inputs[name] = InputSpan(each.dtype, each.shape, *place, each.array.nbytes)
        for name, place in lent_outputs.items():
            if place is not None:
                rooms[name] = OutputSpan(*place, targets[name].attributes.byte_size)
        region, memory = _take(lending.pool, Need(layout.end - begin, 1, record_size, _GROUP), spec.name)
        self._region, self._slot = region, region.slots[0]
        self._memories: Sequence[MappedMemory] = (HostMemory(memory), *lending.memories)
        for name, span in inputs.items():
            if span.region == 0:
                _write(memory, span, given[name])
        generation = self._slot.begin(encode(Table(inputs, rooms, tuple(lending.claims))))
        self.rows = layout.batch_size or 1
        carriers = []
        if layout.batch_size is not None:
            carriers.append(backend.output(BATCH_CARRIER, np.empty((layout.batch_size, 0), np.uint8)))
        named = {SLOT_PARAMETER: self._slot.address_pattern % spec.name, GENERATION_PARAMETER: generation}
        parameters = {**asked.parameters, **named}
        self.request = backend.request(spec.name, asked.version, carriers, asked.names, parameters)

    def result(self, response: Any) -> dict[str, TensorView]:
        if self._slot.is_completed:
            self._slot.become_free("answer")
        tensors = self._tensors_of(response)
        sizes = [memory.byte_size for memory in self._memories]
        data = bytes(self._slot.results)
        if not data:
            raise ClosedError("this model's session")
        found = results.decode(data, sizes, self._region.data_offset, self._spec, self._slot.sent)
        if found.events:
            raise broken_results("an event, though this model does not wait for GPUs")
        outputs = {place.name: self._output(place, tensors) for place in found.outputs}
        for name in set(self._asked.names) - outputs.keys():
            raise missing_output(self.model, name)
        return outputs

    def give_up(self) -> None:
        self._slot.give_up()
        if self._slot.state == SENT:
            self._lending.keep_from_use()

    def spoil_lost_memory(self, response: Any) -> str:
        """Spoil the memory if the other model could not open it, and return its error message; else an empty text."""
        message: str = response.error().message() if response.has_error() else ""
        if code_in(message) not in NOT_OPENED or not self._slot.fence_unstarted():
            return ""
        self._region.spoil("refusal")
        return message

    def _output(self, place: OutputPlace, tensors: Mapping[str, TensorView]) -> TensorView:
        name, dtype, shape, region, offset, byte_size, is_in_response = place
        if is_in_response:
            view = tensors.get(name)
            if view is None:
                raise missing_output(self.model, name)
            if view.triton_dtype != (_BYTES_IN_RESPONSE if dtype is BYTES else dtype.name):
                raise broken_results(f"{name} of {self.model!r}, which came as {view.triton_dtype}")
            self.overflowed[name] = view.attributes.byte_size
            if dtype is BYTES:
                view = StringsView(name, Strings.encoded_as(name, view.numpy(), shape), view.path)
            elif view.shape != shape:
                raise broken_results(f"{name} of {self.model!r}, which came as {list(view.shape)}")
            return self._given_back(name, view)
        found = self._memories[region].view(name, offset, byte_size, dtype, shape, writable=False)
        if found is None:
            raise broken_results(f"{name} of {self.model!r}, which lies outside the memory of its request")
        target = self._asked.hints.get(name)
        if isinstance(target, TensorView) and self._lending.place_of(target.array) == (region, offset):
            self._check_fits(name, target, found)
            return target
        return self._given_back(name, found)


def _take(pool: SlotPool, need: Need, holder: str) -> Any:
    """Take a region without waiting: a model must not wait for memory that its own calls hold."""
    taken = pool.take_idle(need, holder)
    if taken is None:
        waiter = pool.request(need, holder)
        if not waiter.granted.done():
            pool.withdraw(waiter)
            raise pool.exhausted(waiter, 0)
        taken = pool.take_granted(waiter)
    return taken


def _hint_of(wanted: TensorView | int | None) -> int | None:
    return None if wanted is None or isinstance(wanted, TensorView) else index(wanted)


def _write(memory: Any, span: InputSpan, given: Given) -> None:
    dtype, shape = (_BYTE, (given.array.nbytes,)) if span.dtype is BYTES else (span.dtype.numpy, span.shape)
    target = array_at(memory, span.offset, dtype, shape, given.array.nbytes)
    assert target is not None
    np.copyto(target, given.bytes_on_host())
