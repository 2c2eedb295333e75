"""The direct path: tensors in the client's memory.

A :class:`DirectPlan` is what a descriptor means: regions mapped, spans checked, inputs as views. It serves every
request with that descriptor. A :class:`DirectTensors` is one such request, fenced by its generation.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..descriptor import Descriptor, InputSpan, OutputSpan, check_outputs_are_disjoint
from ..dtypes import BYTES, DType
from ..errors import DescriptorError, ModelError, ReplayedRequestError, StaleRequestError
from ..region.cuda_events import Event
from ..region.layout import MAX_RESULTS_LENGTH, SlotRecord
from ..spec import ModelSpec
from ..strings_view import StringsView
from ..view import TensorView
from .regions import ResolvedRegion, UsedSlot

__all__ = ["PATH", "DirectPlan", "DirectTensors", "Output"]

PATH: Final = "direct"
PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.0005
_MOST_REMEMBERED: Final = 64
_LONGEST_EVENT: Final = 160


class Output:
    """One output that the model has made; hashable by identity.

    Attributes
    ----------
    name : str
    view : TensorView
        Over the output's memory.
    place : list or None
        What the client reads in the results: data type, shape, byte size, region and offset. If the output is not in
        the client's memory and goes back through Triton: None, or of strings the data type and the shape.
    source : TensorView or None
        What the model fills instead of ``view``; it is copied there when the call ends.
    """

    __slots__ = ("name", "place", "source", "view")

    def __init__(self, view: TensorView, place: list[Any] | None = None, source: TensorView | None = None) -> None:
        self.source = source
        self.name = view.name
        self.view = view
        self.place = place

    @property
    def is_delivered(self) -> bool:
        """Whether it is in the client's memory."""
        return self.place is not None and len(self.place) > 2


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
    devices : list of int
        The GPUs that its tensors are on.
    """

    def __init__(self, descriptor: Descriptor, spec: ModelSpec, regions: Sequence[ResolvedRegion]) -> None:
        for name, span in descriptor.inputs.items():
            spec.input(name).check(span.dtype, span.shape)
        _check_spans_are_data("inputs", descriptor.inputs, regions)
        _check_spans_are_data("outputs", descriptor.outputs, regions)
        # Two names may stand for one object: only now is it known which spans are really apart.
        check_outputs_are_disjoint(
            descriptor.inputs,
            descriptor.outputs,
            lambda index: (regions[index].mapped.segment.identity, regions[index].begin),
        )
        self._checks = [(region.mapped.segment, region.begin + region.data.stop, region.field) for region in regions]
        self._memories = [
            region.mapped.memory.part(region.begin, region.begin + region.data.stop) for region in regions
        ]
        self._descriptor = descriptor
        self._outputs: dict[tuple[str, tuple[int, ...], np.dtype[Any]], Output] = {}
        self._results: dict[tuple[Output, ...], bytes] = {}
        self.mapped = [region.mapped for region in regions]
        self.slots = [region.slot for region in regions if region.slot is not None]
        self.inputs = {name: self._input(name, span) for name, span in descriptor.inputs.items()}
        used = {span.region for span in descriptor.inputs.values()}
        used |= {span.region for span in descriptor.outputs.values()}
        devices = {self._memories[index].device for index in used}
        self.devices = [device for device in devices if device is not None]

    def check(self) -> None:
        """Raise unless the regions still are what they were. For every request, before anything is touched."""
        for segment, byte_size, field in self._checks:
            segment.check(byte_size, field)

    @property
    def is_current(self) -> bool:
        """Whether every region is still mapped."""
        return not any(mapped.segment.is_closed for mapped in self.mapped)

    def known_output(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output | None:
        """Return what :meth:`output` returned for these before; None if it did not."""
        return self._outputs.get((name, shape, dtype))

    def output(self, name: str, shape: tuple[int, ...], dtype: DType) -> Output | None:
        """Return an output in the client's memory, writable; None if there is no room for it."""
        span = self._descriptor.outputs.get(name)
        if span is None:
            return None
        memory = self._memories[span.region]
        view = memory.view(name, PATH, span.offset, span.byte_size, dtype, shape, writable=True)
        if view is None:
            return None
        place = [dtype.name, shape, view.attributes.byte_size, span.region, span.offset]
        output = Output(view, place)
        _forget_if_many(self._outputs)
        self._outputs[name, shape, dtype.numpy] = output
        return output

    def strings(self, name: str, shape: tuple[int, ...], encoded: npt.NDArray[np.uint8]) -> Output | None:
        """Copy strings to the client's memory and return them as an output; None if there is no room for them."""
        span = self._descriptor.outputs.get(name)
        if span is None or encoded.nbytes > span.byte_size:
            return None
        view = self._memories[span.region].view(name, PATH, span.offset, encoded.nbytes, BYTES, shape, writable=True)
        if not isinstance(view, StringsView):
            return None
        view.strings().encoded[:] = encoded
        return Output(view, [BYTES.name, shape, encoded.nbytes, span.region, span.offset])

    def pass_through(self, name: str, dtype: DType, array: Any, shape: tuple[int, ...]) -> Output | None:
        """Return an output that *is* memory of an input, so that nothing is copied; None if ``array`` is no such."""
        if not self.slots or name not in self._descriptor.outputs or not array.nbytes:
            return None  # nobody would read in the results where the output is
        nbytes = array.nbytes
        for span in self._descriptor.inputs.values():
            memory = self._memories[span.region]
            offset = memory.offset_of(array)
            if offset is not None and span.offset <= offset and offset + nbytes <= span.offset + span.byte_size:
                view = memory.view(name, PATH, offset, nbytes, dtype, shape, writable=False)
                assert view is not None
                return Output(view, [dtype.name, shape, nbytes, span.region, offset])
        return None

    def results(self, outputs: Sequence[Output]) -> bytes:
        """Return the results of a call with these outputs, encoded; nothing if there is no slot to write them to."""
        if not self.slots:
            return b""
        key = tuple(outputs)
        known = self._results.get(key)
        if known is not None:
            return known
        results = json.dumps({output.name: output.place for output in outputs}, separators=(",", ":")).encode()
        if len(results) > MAX_RESULTS_LENGTH:
            raise ModelError(
                f"the results of {len(outputs)} outputs take {len(results)} bytes, but a slot record has room for "
                f"{MAX_RESULTS_LENGTH}; request fewer outputs at once"
            )
        _forget_if_many(self._results)
        self._results[key] = results
        return results

    def _input(self, name: str, span: InputSpan) -> TensorView:
        memory = self._memories[span.region]
        view = memory.view(name, PATH, span.offset, span.byte_size, span.dtype, span.shape, writable=False)
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

    __slots__ = ("_generation", "plan")

    def __init__(self, plan: DirectPlan, generation: int) -> None:
        self.plan = plan
        self._generation = generation
        taken: list[UsedSlot] = []
        try:
            for slot in plan.slots:
                _take(slot, generation)
                taken.append(slot)
            for slot in plan.slots:
                _check_generation(slot.record, generation)
        except BaseException:
            for slot in taken:
                slot.lease.give_back()
            raise
        for slot in plan.slots:
            slot.record.started = generation

    def has_room_for_events(self, results: bytes) -> bool:
        """Return whether the slot's record has room for these results and an event of every GPU."""
        return len(results) + _LONGEST_EVENT * (1 + len(self.plan.devices)) <= MAX_RESULTS_LENGTH

    def complete(self, results: bytes, events: Sequence[Event] = ()) -> None:
        """Write what :meth:`DirectPlan.results` made, and the completion stamps. The last thing before the response."""
        self._end(_with_events(results, events) if events else results)

    def fail(self) -> None:
        """Write the completion stamps of a call that failed: the client may have its memory back."""
        self._end(b"")

    def _end(self, results: bytes) -> None:
        for slot in self.plan.slots:
            slot.record.complete(self._generation, results)
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


def _forget_if_many(remembered: dict[Any, Any]) -> None:
    """Keep a model whose shapes vary without end from filling memory."""
    if len(remembered) >= _MOST_REMEMBERED:
        remembered.clear()
