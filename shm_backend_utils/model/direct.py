"""The direct path: tensors in the client's memory.

A :class:`DirectPlan` is what a descriptor means: regions mapped, spans checked, inputs as views. It serves every
request with that descriptor. A :class:`DirectTensors` is one such request, fenced by its generation.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import DescriptorError, ReplayedRequestError, StaleRequestError
from ..memory.cuda.events import Event
from ..memory.locks import SharedLease, borrow
from ..model_spec import ModelSpec
from ..protocol.descriptor import Descriptor, InputSpan, OutputSpan, SystemRegionClaim, check_outputs_are_disjoint
from ..protocol.region_layout import MAX_RESULTS_LENGTH, SlotRecord
from ..tensors.view import TensorView
from .places import DIRECT, Places
from .regions import ResolvedRegion, UsedSlot

__all__ = ["DirectPlan", "DirectTensors", "Frame"]

PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.0005
_LONGEST_EVENT: Final = 160


class Frame(NamedTuple):
    """One place of a ring; see :mod:`shm_backend_utils.protocol.ring`."""

    places: Places
    record: SlotRecord


class DirectPlan:
    """What a descriptor means in this process.

    Parameters
    ----------
    descriptor : Descriptor
        Its inputs must be those of ``spec``.
    spec : ModelSpec
        The model's.
    regions : sequence of ResolvedRegion
        Those of the descriptor.

    Raises
    ------
    TensorError
        The model does not take these inputs.
    DescriptorError
        A span is not inside its region's data, or an output overlaps another tensor.

    Attributes
    ----------
    inputs : dict of str to TensorView
    mapped : list of MappedRegion
        What the plan uses.
    slots : list of UsedSlot
        Those of its managed regions.
    descriptor : Descriptor
    memories : list of Memory
        Those of its regions.
    places : Places
        Room for the outputs.
    frames : list of Frame
        Room for those of several responses; empty if the client has none.
    devices : list of int
        The GPUs that its tensors are on.
    kind : tuple
        Names, data types and shapes of the inputs, but for their rows: equal for requests that make one batch.
    position : tuple
        Where its memory lies among that of others, to sort by.
    joined : dict
        What :mod:`.joining` has found out about its tensors.
    """

    def __init__(self, descriptor: Descriptor, spec: ModelSpec, regions: Sequence[ResolvedRegion]) -> None:
        for name, span in descriptor.inputs.items():
            spec.input(name).check(span.dtype, span.shape)
        _check_spans_are_data("inputs", descriptor.inputs, regions)
        _check_spans_are_data("outputs", descriptor.outputs, regions)
        # Two names may stand for one object: only now is it known which spans are really apart.
        check_outputs_are_disjoint(
            descriptor, lambda index: (regions[index].mapped.segment.identity, regions[index].begin)
        )
        self._checks = [(region.mapped.segment, region.begin + region.data.stop, region.field) for region in regions]
        self.memories = [region.mapped.memory.part(region.begin, region.begin + region.data.stop) for region in regions]
        self.mapped = [region.mapped for region in regions]
        self.slots = [region.slot for region in regions if region.slot is not None]
        self.descriptor = descriptor
        self.inputs = {name: self._input(name, span) for name, span in descriptor.inputs.items()}
        self.kind = tuple([(name, view.triton_dtype, view.shape[1:]) for name, view in self.inputs.items()])
        first = next(iter(descriptor.inputs.values()), None)
        self.position = () if first is None else (*regions[first.region].mapped.segment.identity, first.offset)
        self.joined: dict[tuple[TensorView, ...], TensorView | None] = {}
        self.lent = [
            (region.mapped.managed, region.lent_slot)
            for region in regions
            if region.lent_slot is not None and region.mapped.managed is not None
        ]
        self._lender = regions[0].mapped.managed if self.lent else None
        self.places = self._places(descriptor, descriptor.outputs)
        self.frames = self._frames(descriptor, regions)
        used = {span.region for span in descriptor.inputs.values()}
        used |= {span.region for span in descriptor.outputs.values()}
        devices = {self.memories[index].device for index in used}
        self.devices = [device for device in devices if device is not None]

    def check(self) -> None:
        """Raise unless the regions still are what they were. For every request, before anything is touched."""
        for segment, byte_size, field in self._checks:
            segment.check(byte_size, field)

    def borrow(self) -> list[SharedLease]:
        """Show the client that memory which another model has lent is in use here too.

        Raises
        ------
        StaleRequestError
            The lender is dead, or the client is just taking its memory back: the request is nobody's any more.
        """
        borrowed: list[SharedLease] = []
        try:
            for region, slot in self.lent:
                lease = borrow(region.segment.fileno(), slot)
                if lease is None:
                    raise StaleRequestError("the client takes back the memory that another model has lent to this one")
                borrowed.append(lease)
            # Only after that: a lender that lives now holds the slots until it has our answer, gives up, or dies.
            if self._lender is not None and self._lender.is_orphaned:
                raise StaleRequestError("the model that has lent its client's memory to this one is gone")
        except BaseException:
            for lease in borrowed:
                lease.give_back()
            raise
        return borrowed

    @property
    def is_current(self) -> bool:
        """Whether every region is still mapped."""
        return not any(mapped.segment.is_closed for mapped in self.mapped)

    def _places(self, descriptor: Descriptor, outputs: Mapping[str, OutputSpan]) -> Places:
        return Places(descriptor.inputs, outputs, self.memories, has_results=bool(self.slots))

    def _frames(self, descriptor: Descriptor, regions: Sequence[ResolvedRegion]) -> list[Frame]:
        ring = descriptor.ring
        if ring is None:
            return []
        spans = [ring.outputs(descriptor.outputs, index) for index in range(ring.frames)]
        _check_spans_are_data("outputs", spans[-1], regions)
        claim, region = next(
            (claim, resolved.mapped.managed)
            for claim, resolved in zip(descriptor.regions, regions, strict=True)
            if isinstance(claim, SystemRegionClaim)
        )
        assert region is not None  # or it would not have been resolved
        last, count = ring.slot + ring.frames - 1, region.header.slot_count
        if last >= count or ring.slot <= claim.slot <= last:
            raise DescriptorError(
                "ring.slot", f"slots {ring.slot} to {last}", f"some of 0 to {count - 1}, without the request's own"
            )
        return [
            Frame(self._places(descriptor, outputs), region.record(ring.slot + index))
            for index, outputs in enumerate(spans)
        ]

    def _input(self, name: str, span: InputSpan) -> TensorView:
        memory = self.memories[span.region]
        view = memory.view(name, DIRECT, span.offset, span.byte_size, span.dtype, span.shape, writable=False)
        if view is None:  # of anything else, the descriptor's parser has compared the span's size with its shape's
            raise DescriptorError(f"inputs.{name}[3]", "strings in memory of a GPU", "strings on the host")
        return view


class DirectTensors:
    """One request on the direct path. Making it claims the request's generation for execution.

    The slots' leases are held until :meth:`complete` or :meth:`fail`. They keep the client from using the memory again
    before that, and a generation from being executed twice at the same time.

    Raises
    ------
    StaleRequestError
        The client has raised a slot's generation since: it gave this request up.
    ReplayedRequestError
        A model has begun with this generation before.
    """

    __slots__ = ("_borrowed", "_generation", "plan")

    def __init__(self, plan: DirectPlan, generation: int) -> None:
        self.plan = plan
        self._generation = generation
        self._borrowed: Sequence[SharedLease] = ()
        taken: list[UsedSlot] = []
        try:
            for slot in plan.slots:
                _take(slot, generation)
                taken.append(slot)
            if plan.lent:
                self._borrowed = plan.borrow()  # before the look at the generation, which a lender raises that gives up
            for slot in plan.slots:
                _check_generation(slot.record, generation)
        except BaseException:
            for lease in self._borrowed:
                lease.give_back()
            for slot in taken:
                slot.lease.give_back()
            raise
        for slot in plan.slots:
            slot.record.started = generation

    def has_room_for_events(self, results: bytes) -> bool:
        """Return whether the slot's record has room for these results and an event of every GPU."""
        return len(results) + _LONGEST_EVENT * (1 + len(self.plan.devices)) <= MAX_RESULTS_LENGTH

    def complete(self, results: bytes, events: Sequence[Event] = ()) -> None:
        """Write what :meth:`Places.results` made, and the completion stamps. The last thing before the response."""
        self._end(_with_events(results, events) if events else results)

    def fail(self) -> None:
        """Write the completion stamps of a call that failed: the client may have its memory back."""
        self._end(b"")

    def abandon(self) -> None:
        """End a call whose memory somebody else may still be using: the client must find out that it is free."""
        self._give_back()

    def _end(self, results: bytes) -> None:
        for slot in self.plan.slots:
            slot.record.complete(self._generation, results)
        self._give_back()

    def _give_back(self) -> None:
        for lease in self._borrowed:
            lease.give_back()
        for slot in self.plan.slots:
            slot.lease.give_back()


def _with_events(results: bytes, events: Sequence[Event]) -> bytes:
    """Add a member that is no output's, as its name is empty."""
    listed = [[event.device_uuid, base64.b64encode(event.handle).decode()] for event in events]
    separator = b"," if results != b"{}" else b""
    return results[:-1] + separator + b'"":' + json.dumps(listed, separators=(",", ":")).encode() + b"}"


def _take(slot: UsedSlot, generation: int) -> None:
    """Take a slot's lease. A stale request may have it for a moment, until it is refused: that is waited for."""
    deadline = 0.0
    while not slot.lease.take():
        _check_generation(slot.record, generation)
        deadline = deadline or time.monotonic() + PATIENCE_S
        if time.monotonic() > deadline:
            raise StaleRequestError("the slot is in use, by another model or by the client that takes it back")
        time.sleep(_PAUSE_S)


def _check_generation(record: SlotRecord, generation: int) -> None:
    if record.generation != generation:
        raise StaleRequestError(
            "request parameter shm_generation is not the slot's: the client has given this request up"
        )
    if record.started >= generation:
        raise ReplayedRequestError(
            "request parameter shm_generation was executed before: every request needs a generation of its own"
        )


def _check_spans_are_data(
    group: str, spans: Mapping[str, InputSpan] | Mapping[str, OutputSpan], regions: Sequence[ResolvedRegion]
) -> None:
    for name, span in spans.items():
        data = regions[span.region].data
        if span.offset < data.start:
            raise DescriptorError(f"{group}.{name}[1]", str(span.offset), f"at least {data.start}, where data begins")
        end = span.offset + span.byte_size
        if end > data.stop:
            raise DescriptorError(f"{group}.{name}", f"an end at byte {end}", f"at most {data.stop}, its region's size")
