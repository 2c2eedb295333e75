"""Faster code for usual calls: numbers on the host, without options, direct in idle memory, or inline.

:func:`begin` leaves all other calls to the general code in :mod:`.calls`, before it takes any memory. The general code
also handles unusual answers and errors. A property test compares the requests and the results of both.
"""

from __future__ import annotations

import functools
import math
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from ..memory.pool.inventory import Need
from ..memory.pool.slot import AFTER, Memory, SlotRegion
from ..protocol.call_layout import ALIGNMENT, CALLS, NO_DEVICES, CallInput, CallLayout
from ..protocol.table import assemble
from .calls import finished, infer
from .core import Core
from .inputs.sources import SAME_VALUES, Outputs, sources
from .known_model import COPIES_MATTER, KnownModel
from .paths.direct import DirectCall, usual_result
from .paths.triton_shm import InlineCall
from .result import Result
from .settings import CallSettings
from .steps import Short, Steps
from .transports.messages import InputTensor

__all__ = ["begin"]


class _Fitting(NamedTuple):
    """The tensors of a call that fit its model."""

    shapes: dict[str, tuple[int, ...]]  # of the inputs
    rows: int | None  # None without a batch dimension
    input_bytes: int
    wanted: dict[str, int | None] | None  # outputs, with the user's sizes or None; None for all
    requested: tuple[str, ...] | None  # the wanted outputs in the configuration's order
    rooms: dict[str, int]  # bytes for each output, in the order of ``wanted``
    end: int  # where the last room ends, counted from the start of a region's data
    is_certain: bool  # False if some room is only learned from earlier calls, or unknown


@dataclass(eq=False, repr=False)
class _ShortCall(Short[Result]):
    core: Core
    settings: CallSettings
    known: KnownModel
    fitting: _Fitting

    @property
    def layout(self) -> CallLayout:
        """The layout of this call in the general code, for a region that no other call shares."""
        known, given = self.known, {}
        for name, shape in self.fitting.shapes.items():
            dtype = known.inputs[name].dtype
            given[name] = CallInput(dtype, shape, math.prod(shape) * dtype.itemsize)
        return known.lay_out(given, self.fitting.wanted)

    def go_on(self, outcome: Any) -> Steps[Result]:
        call = self._in_general(self.layout)
        return finished(self.core, call, call.resume(outcome))

    @abstractmethod
    def _in_general(self, layout: CallLayout) -> InlineCall | DirectCall:
        """Return this call as an object of the general code."""


class _Inline(_ShortCall):
    inputs: Mapping[str, Any]

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy the inputs into the message."""
        forms, requested = self.known.inputs, self.fitting.requested
        wanted = None if requested is None else dict.fromkeys(requested)
        tensors = [InputTensor(name, forms[name].dtype.name, array.shape, array) for name, array in inputs.items()]
        self.inputs = inputs
        self.message = self.core.codec.infer(self.known.spec.name, {}, inputs=tensors, outputs=wanted)

    def result(self, answer: Any) -> Result | None:
        found = self.core.codec.plain_outputs(answer)
        arrays: dict[str, Any] = {}
        for name in self.fitting.requested or self.known.outputs:
            dtype, rank, end, *_ = self.known.outputs[name]
            datatype, shape, content = found.get(name, ("", (), b""))
            fits = datatype == dtype.name and len(shape) == rank and (not end or tuple(shape[rank - len(end) :]) == end)
            if not fits or min(shape, default=1) < 1 or math.prod(shape) * dtype.itemsize != len(content):
                return None
            arrays[name] = np.ndarray(shape, dtype.numpy, bytearray(content))
        self.core.tally.succeeded(InlineCall.path, 0)
        response = functools.partial(self.core.codec.result, answer)
        return Result(arrays, InlineCall.path, response, in_response=tuple(arrays))

    def _in_general(self, layout: CallLayout) -> InlineCall:
        call = InlineCall(self.core.codec, self.settings, self.known, layout, self.fitting.wanted, NO_DEVICES)
        call.write(sources(self.known.spec, self.inputs))
        return call


@dataclass(eq=False, repr=False)
class _Direct(_ShortCall):
    region: SlotRegion
    memory: Memory

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy the inputs, and write the table and the message."""
        known, region, memory = self.known, self.region, self.memory
        shapes, rows, _, _, requested, rooms, *_ = self.fitting
        at, pieces = region.data_offset, []
        for name, array in inputs.items():
            dtype, _, _, kind, text, pack, _, _ = known.inputs[name]
            shape = shapes[name]  # not array.shape, which another thread may change
            lying = np.ndarray(shape, dtype.numpy, memory, at)
            size = lying.nbytes
            pieces.append(pack(at, size, kind, *shape, text))
            np.copyto(lying, array, casting=SAME_VALUES)
            at = (at + size + ALIGNMENT - 1) & -ALIGNMENT
        for name, room in rooms.items():
            pack, kind, text = known.rooms[name]
            pieces.append(pack(at, room, kind, text))
            at = (at + room + ALIGNMENT - 1) & -ALIGNMENT
        slot, model = region.slots[0], known.spec.name
        if slot.messages is None or slot.messages[0] != (model, requested, rows):
            message_of = self.core.codec.for_slot(model, slot.address_pattern % model, requested, rows, {})
            slot.messages = (model, requested, rows), message_of
        self.message = slot.messages[1](slot.begin(assemble(pieces, len(inputs), len(rooms))))

    def result(self, answer: Any) -> Result | None:
        region, core, learned = self.region, self.core, self.known.learned
        _, rows, input_bytes, _, _, rooms, _, is_certain = self.fitting
        slot = region.slots[0]
        response = functools.partial(core.codec.result, answer)
        place = self.memory, region.data_offset, region.data_end
        result = usual_result(self.known, slot, slot.sent, *place, rooms, response, input_bytes)
        if result is None:
            return None
        slot.state = AFTER["answer"][slot.state]
        byte_size = result.bytes_avoided
        if not is_certain and learned.per_row:
            learned.needed.append((byte_size - input_bytes) / (rows or 1))
            if len(learned.needed) >= CALLS and learned.shrink():
                core.pool.drop_idle()
        core.tally.succeeded(DirectCall.path, byte_size)
        return result

    def _in_general(self, layout: CallLayout) -> DirectCall:
        region, known = self.region, self.known
        if region.data_offset != known.data_begin:  # several calls share the region
            layout = layout.moved(region.data_offset - known.data_begin)
        of_all = self.core.codec, self.settings, known, layout, self.fitting.wanted, NO_DEVICES
        return DirectCall(*of_all, region, region.slots[0], self.memory)


def begin(
    core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, most_bytes: float
) -> Short[Result] | Steps[Result]:
    """Return an operation that makes a call: a short one, which has copied the inputs already, or the general one.

    The inputs of a short operation have fewer bytes than ``most_bytes``.
    """
    known = core.known.get((settings.model, settings.version))
    if (
        known is None
        or (known.path != DirectCall.path and known.is_worth_another_look)
        or settings.options
        or core.is_closed
        or type(inputs) is not dict
    ):
        return infer(core, settings, inputs, outputs)
    path = known.path if settings.path == "auto" else settings.path
    inputs = {**inputs}  # another thread may change the user's dict
    fitting = _fitting(known, inputs, outputs) if path in known.open_paths else None
    if fitting is None or fitting.input_bytes >= most_bytes:
        return infer(core, settings, inputs, outputs)
    if settings.path == "auto" and fitting.is_certain and known.data_begin + fitting.end <= known.inline_end:
        path = InlineCall.path
    if path == InlineCall.path and core.codec.reads_plain_outputs and fitting.end < COPIES_MATTER:
        inline = _Inline(core, settings, known, fitting)
        inline.write(inputs)
        return inline
    last, has_batcher = known.last, known.spec.has_batcher
    is_alone = not has_batcher or (known.blocks.together is None and (last is None or last[0]() is None))
    taken = None
    if path == DirectCall.path and is_alone:
        taken = core.pool.take_idle(Need(fitting.end, 1, known.record_byte_size, kind=known.kind), settings.origin)
    if taken is None:
        return infer(core, settings, inputs, outputs)
    call = _Direct(core, settings, known, fitting, *taken)
    del taken  # from here on only the call keeps the memory
    call.write(inputs)
    if has_batcher:
        known.last = weakref.ref(call), None
    return call


def _fitting(  # noqa: PLR0911, PLR0912  # one function: each further one costs a call a microsecond
    known: KnownModel, inputs: Mapping[str, Any], outputs: Outputs
) -> _Fitting | None:
    """Return the checked tensors of a call; None if a tensor is unusual, or does not fit the model."""
    spec, of_outputs = known.spec, known.outputs
    if len(inputs) != len(spec.inputs):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    rows, most_rows, input_bytes, end = None, spec.max_batch_size, 0, 0
    for name, array in inputs.items():
        form = known.inputs.get(name)
        if form is None or type(array) is not np.ndarray or array.dtype is not form.dtype.numpy:
            return None
        shape, size, wanted_shape = array.shape, array.nbytes, spec.inputs[name].shape
        shapes[name] = shape
        if len(shape) != form.rank:
            return None
        for found, want in zip(shape, wanted_shape, strict=True):
            if want not in (found, -1):
                return None
        if most_rows:
            if rows not in (None, shape[0]) or not 1 <= shape[0] <= most_rows:
                return None
            rows = shape[0]
        input_bytes += size
        end += (size + ALIGNMENT - 1) & -ALIGNMENT
    if most_rows and rows is None:
        return None
    wanted: dict[str, int | None] | None = None
    requested = None
    if outputs is None:
        if len(of_outputs) != len(spec.outputs):
            return None
    elif type(outputs) is not dict and type(outputs) is not list:
        return None
    else:
        requested = tuple([name for name in of_outputs if name in outputs]) if {*map(type, outputs)} == {str} else ()
        if not requested or len(requested) != len(outputs):
            return None
        wanted = cast("dict[str, int | None]", {**outputs} if type(outputs) is dict else dict.fromkeys(outputs))
    rooms, is_certain = {}, True
    for name in of_outputs if wanted is None else wanted:
        room = None if wanted is None else wanted[name]
        if room is None:
            room = spec.outputs[name].row_byte_size
            if room is None:
                room, is_certain = known.learned.per_row.get(name, 0), False
            room *= rows or 1
        elif type(room) is not int or room < 0:
            return None
        rooms[name] = room
        end += (room + ALIGNMENT - 1) & -ALIGNMENT
    return _Fitting(shapes, rows, input_bytes, wanted, requested, rooms, end, is_certain)
