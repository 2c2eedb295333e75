"""The direct path: a request names only a slot, whose table describes the tensors. Users fill prepared slots."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import NOT_OPENED, ClosedError, SlotInDoubtError, TensorError, code_in
from ...memory.managed import RegionKind
from ...memory.pool.slot import AFTER, FREE, SENT, Memory, Slot, SlotRegion
from ...protocol import results
from ...protocol.call_layout import CallLayout, aligned
from ...protocol.results import broken_results, missing_output
from ...protocol.spans import InputSpan, OutputSpan
from ...protocol.table import encode
from ...tensors.strings import Strings
from ..errors import InferenceError, MemoryRefusedError
from ..inputs.sources import Source, source_of
from ..known_model import KnownModel
from ..result import Result
from ..steps import Send, Steps
from .call import Call, InRegion, is_answer, output_in
from .gpu_waits import LostMemoryError
from .on_gpus import CallOnGpus, GpuBuffer
from .triton_shm import no_strings

__all__ = ["DirectCall", "PreparedDirectCall", "result_of", "usual_result"]

_BYTE_SIZE: Final = operator.attrgetter("byte_size")
_BY_PLACE: Final = operator.attrgetter("region", "offset")
_BYTE: Final = np.dtype(np.uint8)
_NO_MEMORY: Final[Memory] = np.empty(0, np.uint8)


@dataclass(eq=False, repr=False)
class DirectCall(InRegion, Call):
    """A call whose tensors lie in a slot, which is in use as long as ``memory`` or an array made from it lives."""

    region: SlotRegion
    slot: Slot
    memory: Memory
    gpus: CallOnGpus | None = field(default=None, init=False)
    buffers: Sequence[GpuBuffer] = ()
    """The GPU memory that the table names in addition to the slot's own region; the first buffer has number 1."""
    _request: tuple[str, CallLayout, bytes, Callable[[int], Any]] | None = field(default=None, init=False)
    """The return value of :meth:`_describe`, kept from request to request."""

    path = "direct"

    @property
    def kind(self) -> RegionKind:
        return self.region.kind

    def arrays(self) -> dict[str, Any]:
        memory, inputs = self.memory, self.layout.table.inputs
        on_host = {name: self._input(memory, span) for name, span in inputs.items() if not span.region}
        return on_host | no_strings(self.layout)

    def sources(self) -> dict[str, Source]:
        memory = self.memory
        found: dict[str, Source] = {} if self.gpus is None else {**self.gpus.sources(memory)}
        for name, span in self.layout.table.inputs.items():
            if not span.region:
                array = self._input(memory, span)
                is_text = span.dtype is BYTES
                found[name] = source_of(name, _strings(name, array, span.shape) if is_text else array)
        return found

    def did_not_start(self, _: InferenceError) -> bool:
        """Return whether no model has begun the refused request or can begin it later."""
        return self.slot.fence_unstarted()

    def send(self, deadline: float) -> Steps[Result]:
        memory, buffers = self.memory, self.buffers  # keep the slot in use even if close() comes meanwhile
        if self.is_closed:
            raise ClosedError("this call")
        slot, gpus = self.slot, self.gpus
        if gpus is not None and gpus.is_lost:
            raise LostMemoryError
        if slot.state != FREE:
            yield from self._take_back(deadline)
        elif gpus is not None:
            yield from gpus.models_are_done(deadline)  # a GPU may work on after the last answer
        slot.kept = buffers
        pattern, layout, table, message_of = self._request or self._describe()
        if pattern is not slot.address_pattern or layout is not self.layout:  # the region has grown
            _, _, table, message_of = self._describe()
        message = message_of(slot.begin(table))
        try:
            answer = yield Send(message, deadline)
            return (yield from self._received(answer, memory, buffers, gpus, deadline))
        except BaseException as error:
            self._note_failure(error, gpus)
            raise

    def _describe(self) -> tuple[str, CallLayout, bytes, Callable[[int], Any]]:
        """Return, and keep, the slot's pattern, layout, encoded table, and a function that makes a number's message."""
        pattern, layout = self.slot.address_pattern, self.layout
        model, options = self.known.spec.name, self.settings.options
        message_of = self.codec.for_slot(model, pattern % model, layout.requested, layout.batch_size, options)
        self._request = pattern, layout, encode(layout.table), message_of
        return self._request

    def resume(self, outcome: Any) -> Steps[Result]:
        """Continue the call with the answer to its request, or with the request's error."""
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return (yield from self._received(outcome, self.memory, self.buffers, self.gpus, self.settings.deadline))
        except BaseException as error:
            self._note_failure(error, self.gpus)
            raise

    def _received(
        self, answer: Any, memory: Memory, buffers: Sequence[GpuBuffer], gpus: CallOnGpus | None, deadline: float
    ) -> Steps[Result]:
        slot, spec, layout, region = self.slot, self.known.spec, self.layout, self.region
        avoided = sum(map(_BYTE_SIZE, layout.table.inputs.values()))
        response = functools.partial(self.codec.result, answer)
        result = None
        if gpus is None and len(layout.table.outputs) == len(layout.requested or spec.outputs):
            place, wanted = (memory, region.data_offset, region.data_end), layout.table.outputs
            result = usual_result(self.known, slot, slot.sent, *place, wanted, response, avoided)
        if result is None:
            data = bytes(slot.results)
            if not data:
                raise ClosedError("this client")
            sizes = [region.data_end, *map(_BYTE_SIZE, buffers)]
            outputs, events, _ = results.decode(data, sizes, region.data_offset, spec, slot.sent)
            if events:
                if gpus is None:
                    raise broken_results("an event of memory that has none")
                yield from gpus.outputs_are_ready(outputs, events, deadline)
            names = {place.name for place in outputs}
            for name in layout.requested or spec.outputs:
                if name not in names:
                    raise missing_output(spec.name, name)
            result = result_of(outputs, memory, buffers, response, avoided)
        if slot.state != FREE and (gpus is None or not gpus.are_lent_in_use):
            slot.state, slot.kept = AFTER["answer"][slot.state], ()
        return result

    def _note_failure(self, error: BaseException, gpus: CallOnGpus | None) -> None:
        """Note the slot's state after a failed request; raise MemoryRefusedError if the model could not open it."""
        slot = self.slot
        if slot.state == SENT and slot.is_completed and (gpus is None or not gpus.are_lent_in_use):
            slot.become_free("answer")  # at once: to reclaim it takes longer than the call
        if is_answer(error) and code_in(str(error)) in NOT_OPENED and slot.fence_unstarted():
            self.region.spoil("refusal")
            message = f"{error.message()}; this call's memory is lost: prepare another call"
            raise MemoryRefusedError(message, error.status()) from None

    def close(self) -> None:
        self.is_closed = True
        self.memory = _NO_MEMORY
        self.gpus, self.buffers = None, ()

    def _take_back(self, deadline: float) -> Steps[None]:
        """Free the slot after a request without an answer; SlotInDoubtError if a model is still at the request."""
        if not self.slot.fence():
            raise SlotInDoubtError(
                "a request of this call got no answer, and a model is still executing it in this call's memory; infer "
                "again later, or prepare another call"
            )
        if self.gpus is not None:  # the model's GPU may work longer than the model itself
            yield from self.gpus.models_are_done(deadline)
        self.slot.become_free("reclaim")


def usual_result(
    known: KnownModel,
    slot: Slot,
    number: int,
    memory: Memory,
    begin: int,
    end: int,
    wanted: Collection[str],
    response: Callable[[], Any],
    bytes_avoided: int,
) -> Result | None:
    """Return the result that has this number; None unless all wanted outputs are numbers in ``memory[begin:end]``."""
    data = bytes(slot.results)
    found = results.read_expected(data, number, begin, end, wanted, known.outputs) if data else None
    if found is None:
        return None
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, shape, offset) in found.items():
        array = arrays[name] = np.ndarray(shape, dtype.numpy, memory, offset)
        bytes_avoided += array.nbytes
    return Result(arrays, DirectCall.path, response, {}, bytes_avoided)


def result_of(
    places: Sequence[results.OutputPlace],
    memory: Memory,
    buffers: Sequence[GpuBuffer],
    response: Callable[[], Any],
    bytes_avoided: int = 0,
    inputs_end: int = 0,
) -> Result:
    """Return the outputs in these places, or in the response; the places were checked against the configuration."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    overflowed: dict[str, int] = {}
    for name, dtype, shape, region, offset, byte_size, is_in_response in places:
        try:
            if is_in_response:
                array = output_in(response(), name)
                if array is None:
                    raise broken_results(f"{name}, which the response lacks")
                overflowed[name] = array.nbytes
                if dtype is BYTES:
                    array = _strings(name, array, shape)
                elif (array.dtype, array.shape) != (dtype.numpy, shape):
                    raise broken_results(f"{name}, which came as {array.dtype} {list(array.shape)}")
            elif dtype is BYTES and not region:
                array = _strings(name, memory[offset : offset + byte_size], shape)
            elif region:
                if dtype is BYTES:
                    raise broken_results(f"{name}, which are strings, on a GPU")
                array = buffers[region - 1].array_at(memory, offset, dtype.numpy, shape)
            else:
                array = np.ndarray(shape, dtype.numpy, memory, offset)
                if offset < inputs_end:
                    array = array.copy()
        except ValueError as error:  # a TensorError, or NumPy's own for too many or too large dimensions
            raise broken_results(error) from None
        arrays[name] = array
        bytes_avoided += byte_size
    if len(arrays) > 1:
        _separate(places, arrays)
    return Result(arrays, DirectCall.path, response, overflowed, bytes_avoided, tuple(overflowed))


def _separate(places: Sequence[results.OutputPlace], arrays: dict[str, Any]) -> None:
    """Copy outputs that overlap others: otherwise writing to one would change another, unlike on other paths."""
    ends: dict[int, int] = {}
    for place in sorted(places, key=_BY_PLACE):
        array = arrays[place.name]
        if not isinstance(array, np.ndarray):
            continue
        if place.offset < ends.get(place.region, 0):
            arrays[place.name] = array.copy()
        ends[place.region] = max(place.offset + place.byte_size, ends.get(place.region, 0))


def _strings(name: str, encoded: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if encoded.dtype != _BYTE:
        raise broken_results(f"{name} as {encoded.dtype}")
    return Strings.encoded_as(name, encoded, shape).numpy()


class _GrownArray:
    """The base of a grown region's array: it keeps the first array alive, which marks the region as in use."""

    def __init__(self, memory: Memory, former: Memory) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self.first = memory, getattr(former.base, "first", former)


@dataclass(eq=False, repr=False)
class PreparedDirectCall(DirectCall):
    """A call whose inputs the user fills; its region grows at the end, for outputs that found no room."""

    lacking: Mapping[str, int] = field(default_factory=dict, init=False)  # bytes of each host output that found no room
    _filled: dict[str, Any] | None = field(default=None, init=False)

    def arrays(self) -> dict[str, Any]:
        if self._filled is None:
            self._filled = super().arrays()
        return dict(self._filled)

    def send(self, deadline: float) -> Steps[Result]:
        if self.known.has_strings:
            arrays, memory = self.arrays(), self.memory
            self._check_is_open()  # asked last: a closed call has neither
            for name, span in self.layout.table.inputs.items():
                if span.dtype is BYTES:
                    _write_strings(name, arrays[name], memory, span)
        result = yield from super().send(deadline)
        if result.overflowed or self.lacking:
            rooms = self.layout.table.outputs
            self.lacking = {name: size for name, size in result.overflowed.items() if not rooms[name].region}
        return result

    def with_room(self, learned: Mapping[str, int]) -> CallLayout:
        """Return the layout with room for the lacking outputs behind the others; ``learned`` has the bytes per row."""
        layout, outputs = self.layout, dict(self.layout.table.outputs)
        others = [room for name, room in outputs.items() if name not in self.lacking]
        spans: list[InputSpan | OutputSpan] = [*layout.table.inputs.values(), *others]
        ends = [span.offset + span.byte_size for span in spans if not span.region]
        end, rows = aligned(max(ends, default=self.region.data_offset)), layout.batch_size or 1
        for name, size in self.lacking.items():
            outputs[name] = OutputSpan(0, end, max(size, learned.get(name, 0) * rows))
            end = aligned(end + outputs[name].byte_size)
        in_order = {name: outputs[name] for name in sorted(outputs, key=lambda name: _BY_PLACE(outputs[name]))}
        table = layout.table._replace(outputs=in_order)
        return layout._replace(table=table, end=end, certain=layout.certain | self.lacking.keys())

    def grow(self, layout: CallLayout) -> None:
        """Use a layout that fits the grown region, unless the call was closed meanwhile."""
        if not self.is_closed:
            memory = np.frombuffer(self.region.buffer, np.uint8)
            if memory.nbytes > self.memory.nbytes:
                self.memory = np.asarray(_GrownArray(memory, self.memory))
            self.layout, self.lacking = layout, {}

    def close(self) -> None:
        super().close()
        self._filled = {}
        self.lacking = {}


def _write_strings(name: str, array: npt.NDArray[Any], memory: Memory, span: InputSpan) -> None:
    encoded = Strings.of(name, array).encoded
    if encoded.nbytes > span.byte_size:
        raise TensorError(
            name,
            f"the strings of input {name!r} take {encoded.nbytes} bytes, but the call was prepared for "
            f"{span.byte_size}; describe them as (shape, 'S100') if 100 is the length of the longest",
        )
    memory[span.offset : span.offset + encoded.nbytes] = encoded
