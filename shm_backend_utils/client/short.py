"""The short way of a call that is like most: arrays on the host, no options, direct in idle memory, or in band.

Where a call is unlike these, nothing has been taken for it, and :mod:`.calls` has the way of all calls; so it has after
any answer but the usual one. A test compares what both send, and return.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import numpy as np

from ..memory.pool.inventory import Need
from ..memory.pool.slot import AFTER, Memory, SlotRegion
from ..protocol.call_layout import ALIGNMENT, CALLS, NO_DEVICES, CallInput, CallLayout
from ..protocol.table import assemble
from .calls import finished, infer
from .core import Core
from .inputs.sources import Outputs, sources, wanted_outputs
from .known_model import KnownModel
from .paths.call import Call
from .paths.direct import DirectCall, usual_result
from .paths.triton_shm import InlineCall
from .result import Result
from .settings import CallSettings
from .steps import Short, Steps
from .transports.messages import InputTensor

__all__ = ["begin"]

_PATHS: Final = frozenset({"auto", DirectCall.path})
_SEVERAL: Final = (dict, list, tuple)
_NO_HINTS: Final[Mapping[str, int]] = {}


class _Fitting(NamedTuple):
    """Tensors that fit their model."""

    shapes: dict[str, tuple[int, ...]]  # of the inputs
    rows: int | None  # None without a batch dimension
    input_bytes: int
    requested: tuple[str, ...] | None  # outputs, in the configuration's order; None for all
    rooms: dict[str, int]  # for outputs, in the order that they are wanted in
    end: int  # of them all, from where the data of a region begin
    is_certain: bool  # whether the rooms are


@dataclass(eq=False, repr=False)
class _ShortCall(Short[Result]):
    core: Core
    settings: CallSettings
    known: KnownModel
    outputs: Outputs  # as the user wants them
    fitting: _Fitting
    message: Any = field(default=None, init=False)

    @property
    def layout(self) -> CallLayout:
        """The layout that any call has, in a region by itself."""
        inputs, known = self.known.inputs, self.known
        given = {}
        for name, shape in self.fitting.shapes.items():
            dtype = inputs[name].dtype
            given[name] = CallInput(dtype, shape, math.prod(shape) * dtype.itemsize)
        return known.lay_out(given, wanted_outputs(self.outputs).byte_sizes)

    def go_on(self, outcome: Any) -> Steps[Result]:
        call = self._like_all(wanted_outputs(self.outputs).byte_sizes)
        return finished(self.core, call, call.resume(outcome, self.settings.deadline))

    @abstractmethod
    def _like_all(self, wanted: Mapping[str, int | None] | None) -> Call:
        """Return the call as any is, with the memory that it has."""


@dataclass(eq=False, repr=False)
class _Inline(_ShortCall):
    inputs: Mapping[str, Any]

    def write(self) -> None:
        known, requested = self.known, self.fitting.requested
        tensors = [InputTensor(name, known.inputs[name].dtype.name, x.shape, x) for name, x in self.inputs.items()]
        wanted = None if requested is None else dict.fromkeys(requested)
        self.message = self.core.codec.infer(known.spec.name, {}, inputs=tensors, outputs=wanted)

    def result(self, answer: Any) -> Result | None:
        codec, outputs = self.core.codec, self.known.outputs
        found = codec.plain_outputs(answer)
        arrays: dict[str, Any] = {}
        for name in self.fitting.requested or outputs:
            dtype, rank, end, *_ = outputs[name].form
            said, shape, content = found.get(name, ("", (), b""))
            fits = said == dtype.name and len(shape) == rank and (not end or tuple(shape[-len(end) :]) == end)
            if not fits or math.prod(shape) * dtype.itemsize != len(content):
                return None
            arrays[name] = np.ndarray(shape, dtype.numpy, bytearray(content))
        self.core.tally.succeeded(InlineCall.path, 0)
        return Result(arrays, InlineCall.path, functools.partial(codec.result, answer), in_response=tuple(arrays))

    def _like_all(self, wanted: Mapping[str, int | None] | None) -> Call:
        call = InlineCall(self.core.codec, self.settings, self.known, self.layout, wanted, NO_DEVICES)
        call.write(sources(self.known.spec, self.inputs))
        return call


@dataclass(eq=False, repr=False)
class _Direct(_ShortCall):
    region: SlotRegion
    memory: Memory

    def write(self, inputs: Mapping[str, Any]) -> None:
        known, region, memory = self.known, self.region, self.memory
        _, rows, _, requested, rooms, _, _ = self.fitting
        at, pieces = region.data_offset, []
        for name, array in inputs.items():
            _, numpy, _, (kind, text, pack) = known.inputs[name]
            shape, size = array.shape, array.nbytes
            pieces.append(pack(at, size, kind, *shape, text))
            np.ndarray(shape, numpy, memory, at)[...] = array
            at = (at + size + ALIGNMENT - 1) & -ALIGNMENT
        for name, room in rooms.items():
            kind, text, pack = known.outputs[name].room
            pieces.append(pack(at, room, kind, text))
            at = (at + room + ALIGNMENT - 1) & -ALIGNMENT
        slot, model = region.slots[0], known.spec.name
        if slot.request is None or slot.request[0] != (model, requested, rows):
            message_of = self.core.codec.for_slot(model, slot.address_pattern % model, requested, rows)
            slot.request = (model, requested, rows), message_of
        self.message = slot.request[1](slot.begin(assemble(pieces, len(inputs), len(rooms))))

    def result(self, answer: Any) -> Result | None:
        region, core, learned = self.region, self.core, self.known.learned
        _, rows, input_bytes, _, rooms, _, is_certain = self.fitting
        slot = region.slots[0]
        response = functools.partial(core.codec.result, answer)
        result = usual_result(self.known, region, slot, self.memory, rooms, response, input_bytes)
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

    def _like_all(self, wanted: Mapping[str, int | None] | None) -> Call:
        region, known, layout = self.region, self.known, self.layout
        if region.data_offset != known.data_begin:  # one of several that lie in one region
            layout = layout.moved(region.data_offset - known.data_begin)
        of_all = self.core.codec, self.settings, known, layout, wanted, NO_DEVICES
        return DirectCall(*of_all, region, region.slots[0], self.memory)


def begin(
    core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, most_bytes: float
) -> Short[Result] | Steps[Result]:
    """Return the operation of a call: a short one, whose inputs have been copied, or that of all calls.

    To copy more than ``most_bytes`` takes too long for a short one.
    """
    known = core.known.get((settings.model, settings.version))
    is_usual = known is not None and known.path == DirectCall.path and settings.path in _PATHS and not settings.options
    fitting = _fitting(known, inputs, outputs) if is_usual and known is not None and not core.is_closed else None
    if known is None or fitting is None or fitting.input_bytes > most_bytes:
        return infer(core, settings, inputs, outputs)
    outputs = copy.copy(outputs)  # the user's may change
    if fitting.is_certain and settings.path == "auto" and known.data_begin + fitting.end <= known.inline_end:
        inline = _Inline(core, settings, known, outputs, fitting, {**inputs})
        inline.write()
        return inline
    last, has_batcher = known.last, known.spec.has_batcher
    taken = None
    if not has_batcher or (known.blocks.together is None and (last is None or last[0]() is None)):  # else beside others
        taken = core.pool.take_idle(Need(fitting.end, 1, known.record_byte_size, kind=known.kind), settings.origin)
    if taken is None:
        return infer(core, settings, inputs, outputs)
    call = _Direct(core, settings, known, outputs, fitting, *taken)
    del taken  # the call alone has the memory
    call.write(inputs)
    if has_batcher:
        known.last = weakref.ref(call), None
    return call


def _fitting(  # noqa: PLR0911, PLR0912  # one function: each further one costs a call a microsecond
    known: KnownModel, inputs: Mapping[str, Any], outputs: Outputs
) -> _Fitting | None:
    """Return a call's tensors; None if one is unlike most, or does not fit the model."""
    spec, of_inputs, of_outputs = known.spec, known.inputs, known.outputs
    if type(inputs) is not dict or len(inputs) != len(spec.inputs):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    rows, most_rows, input_bytes, end = None, spec.max_batch_size, 0, 0
    for name, array in inputs.items():
        tensor = of_inputs.get(name)
        if tensor is None or type(array) is not np.ndarray or array.dtype is not tensor.numpy:
            return None
        shape, size = array.shape, array.nbytes
        shapes[name] = shape
        if len(shape) != len(tensor.shape):
            return None
        for is_size, want in zip(shape, tensor.shape, strict=True):
            if want not in (is_size, -1):
                return None
        if most_rows:
            if rows not in (None, shape[0]) or not 1 <= shape[0] <= most_rows:
                return None
            rows = shape[0]
        input_bytes += size
        end += (size + ALIGNMENT - 1) & -ALIGNMENT
    if most_rows and rows is None:
        return None
    requested, hints = None, _NO_HINTS
    wanted: Collection[str] = of_outputs
    if outputs is None:
        if len(wanted) != len(spec.outputs):
            return None
    elif type(outputs) not in _SEVERAL:
        return None
    else:
        wanted, hints = cast("Collection[str]", outputs), outputs if type(outputs) is dict else hints
        requested = tuple([name for name in of_outputs if name in wanted])
        if not requested or len(requested) != len(wanted):
            return None
    rooms, is_certain = {}, True
    for name in wanted:
        room = hints.get(name)
        if room is None:
            room = of_outputs[name].row_byte_size
            if room is None:
                room, is_certain = known.learned.per_row.get(name, 0), False
            room *= rows or 1
        elif type(room) is not int or room < 0:
            return None
        rooms[name] = room
        end += (room + ALIGNMENT - 1) & -ALIGNMENT
    return _Fitting(shapes, rows, input_bytes, requested, rooms, end, is_certain)
