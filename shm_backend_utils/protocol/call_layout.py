"""Where the tensors of a call go in a slot: arithmetic on shapes, for clients and forwarding models. Pure.

Tensors follow one another, each at a multiple of :data:`ALIGNMENT`: first the inputs of a call, then room for its
outputs. The order is the same on the host and in the memory of each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from ..dtypes import BYTES, DType
from ..errors import BatchSizeError, MissingTensorError, TensorError, TensorTypeError
from ..model_spec import ModelSpec, TensorSpec
from . import layout, table
from .claims import MAX_REGIONS
from .spans import MAX_TENSORS, InputSpan, OutputSpan, Table

__all__ = [
    "ALIGNMENT",
    "CALLS",
    "LENT",
    "NO_DEVICES",
    "AnyInput",
    "CallInput",
    "CallLayout",
    "LearnedSizes",
    "aligned",
    "lay_out",
    "obstacle_in_tensors",
    "record_byte_size",
    "rows_of",
]

ALIGNMENT: Final = 256
"""The alignment that ``dlpack.h`` asks of producers."""

LENT: Final = MAX_REGIONS + 1
"""The region number in the spans of lent inputs; no real region has it."""


class AnyInput(Protocol):
    """Any object with the attributes of a :class:`CallInput`."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def byte_size(self) -> int: ...
    @property
    def device(self) -> int | None: ...
    @property
    def is_lent(self) -> bool: ...


class CallInput(NamedTuple):
    """An input of a call, without its data."""

    dtype: DType
    shape: tuple[int, ...]  # with the batch dimension, where the model has one
    byte_size: int  # for strings, the room to reserve
    device: int | None = None  # the GPU, by this process' numbers; None for the host
    is_lent: bool = False  # used in place, in the user's own GPU memory


class CallLayout(NamedTuple):
    """The layout of a call: region 0 is the slot's own, region 1 is on the first of the call's GPUs, and so on."""

    table: Table  # further regions are added later
    batch_size: int | None  # None without a batch dimension
    certain: frozenset[str]  # outputs whose size the configuration or the user's hint gives
    requested: Mapping[str, None] | None  # names in the order of the configuration; None for all
    end: int  # of the last tensor on the host, as an offset in the region
    devices: tuple[int, ...] = ()  # GPUs on which the call needs memory
    device_byte_sizes: tuple[int, ...] = ()
    lent: tuple[str, ...] = ()  # inputs

    def moved(self, distance: int) -> CallLayout:
        """Return the layout with all offsets raised by ``distance`` bytes; only for layouts without GPUs."""
        inputs = {name: span._replace(offset=span.offset + distance) for name, span in self.table.inputs.items()}
        outputs = {name: room._replace(offset=room.offset + distance) for name, room in self.table.outputs.items()}
        return self._replace(table=Table(inputs, outputs), end=self.end + distance)


def aligned(offset: int) -> int:
    """Return where the next tensor may begin."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def record_byte_size(spec: ModelSpec) -> int:
    """Return the size of slot records, in whole pages, so that each half has room for any call of a model."""
    needed, size = _needed_of_record(spec), layout.PAGE_SIZE
    while size // 2 < needed and size < layout.MAX_RECORD_BYTE_SIZE:
        size *= 2
    return size


def obstacle_in_tensors(spec: ModelSpec) -> str | None:
    """Return why a slot cannot describe the tensors of a model's calls; None if it can."""
    tensors = (*spec.inputs.values(), *spec.outputs.values())
    if len(tensors) > MAX_TENSORS:
        return f"model {spec.name!r} has {len(tensors)} inputs and outputs; a slot can describe {MAX_TENSORS}"
    for tensor in tensors:
        if len(tensor.shape) > table.MAX_RANK:
            return f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions; a slot can describe {table.MAX_RANK}"
        if len(tensor.name.encode()) > _LONGEST_NAME:
            return f"a tensor of model {spec.name!r} has a name of more than {_LONGEST_NAME} bytes"
    if _needed_of_record(spec) > layout.MAX_RECORD_BYTE_SIZE // 2:
        return f"the names of the tensors of model {spec.name!r} are longer than a slot has room for"
    return None


def _needed_of_record(spec: ModelSpec) -> int:
    """Return the bytes that a half of a record needs for any call of a model."""
    inputs, outputs = _length(spec.inputs.values()), _length(spec.outputs.values())
    further = _OWN_REGIONS * _CLAIM_LENGTH + min(len(spec.inputs), _MOST_LENT) * _LENT_CLAIM_LENGTH
    return table.HEAD_LENGTH + inputs + outputs + further  # results need less


NO_DEVICES: Final[Mapping[str, int]] = MappingProxyType({})
"""The value of ``output_devices`` if all outputs are on the host."""

_OWN_REGIONS: Final = 5  # a record has room for these, with events: four GPUs, and an overflow
_CLAIM_LENGTH: Final = 160
_MOST_LENT: Final = MAX_REGIONS - _OWN_REGIONS  # and this many lent inputs
_LENT_CLAIM_LENGTH: Final = 96
_LONGEST_NAME: Final = 2**16 - 1


def lay_out(
    spec: ModelSpec,
    inputs: Mapping[str, AnyInput],
    wanted: Mapping[str, int | None] | None,
    begin: int,
    *,
    learned: Mapping[str, int],
    most_rows: int,
    output_devices: Mapping[str, int] = NO_DEVICES,
) -> CallLayout:
    """Check a call against the model's configuration, and lay it out from ``begin`` on; TensorError if it does not fit.

    ``wanted`` maps outputs to the user's hints in bytes; None means all outputs. ``learned`` has the bytes per row that
    outputs needed before; they give the room if neither a hint nor the configuration gives a size.
    """
    cursor = begin
    spans: dict[str, InputSpan] = {}
    on_devices: dict[str, int] = {}
    rows = None
    is_one_size = True  # all inputs have one batch size
    for name, each in inputs.items():
        dtype, shape, byte_size = each.dtype, each.shape, each.byte_size
        (spec.inputs.get(name) or spec.input(name)).check(dtype, shape)
        if spec.max_batch_size:
            is_one_size = is_one_size and rows in (None, shape[0])
            rows = shape[0]
        if each.device is not None:
            on_devices[name] = each.device
            continue
        spans[name] = InputSpan(dtype, shape, 0, cursor, byte_size)
        cursor = (cursor + byte_size + ALIGNMENT - 1) & -ALIGNMENT
    if len(inputs) < len(spec.inputs):
        _check_none_is_missing(spec, inputs)
    if spec.max_batch_size and not (is_one_size and rows is not None and 1 <= rows <= most_rows):
        raise _batch_refused(spec, inputs, most_rows)
    batch_size, rows = rows, rows or 1
    rooms: dict[str, OutputSpan] = {}
    certain = []
    for name in spec.outputs if wanted is None else wanted:
        tensor = spec.outputs.get(name) or spec.output(name)
        if tensor.dtype is None:
            continue
        room = None if wanted is None else wanted[name]
        if room is None and tensor.row_byte_size is not None:
            room = tensor.row_byte_size * rows
        if room is None:
            room = learned.get(name, 0) * rows
        else:
            certain.append(name)
        if name in output_devices:
            if tensor.dtype is BYTES:
                raise _strings_on_a_gpu(name)
            on_devices[name] = output_devices[name]
            rooms[name] = OutputSpan(0, 0, room)
            continue
        rooms[name] = OutputSpan(0, cursor, room)
        cursor = (cursor + room + ALIGNMENT - 1) & -ALIGNMENT
    requested = None if wanted is None else {name: None for name in spec.outputs if name in wanted}
    found = CallLayout(Table(spans, rooms), batch_size, frozenset(certain), requested, cursor)
    return _with_devices(found, inputs, output_devices) if on_devices else found


def rows_of(whole: CallLayout, spec: ModelSpec, begin: int, end: int) -> CallLayout:
    """Return the layout of some of a call's rows; outputs of unknown size get their share of room in whole elements."""
    assert whole.batch_size is not None
    rows, count = whole.batch_size, end - begin
    inputs, outputs = {}, {}
    for name, span in whole.table.inputs.items():
        row_size = span.byte_size // rows
        shape, offset = (count, *span.shape[1:]), span.offset + begin * row_size
        inputs[name] = InputSpan(span.dtype, shape, span.region, offset, count * row_size)
    for name, room in whole.table.outputs.items():
        dtype, row_size = spec.outputs[name].dtype, room.byte_size // rows
        assert dtype is not None  # an output without a type has no room
        row_size -= row_size % (dtype.itemsize or 1)
        outputs[name] = OutputSpan(room.region, room.offset + begin * row_size, count * row_size)
    return whole._replace(table=Table(inputs, outputs), batch_size=count)


def _length(tensors: Iterable[TensorSpec]) -> int:
    return sum(table.tensor_length(tensor.name, len(tensor.shape)) for tensor in tensors)


def _batch_refused(spec: ModelSpec, inputs: Mapping[str, AnyInput], most: int) -> TensorError:
    sizes = {name: each.shape[0] for name, each in inputs.items()}
    if not sizes:
        return MissingTensorError(
            "", f"model {spec.name!r} takes batches, so a call needs an input to tell the batch size; found no input"
        )
    name, size = next(iter(sizes.items()))
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        return BatchSizeError(name, f"inputs of one request must have one batch size; found {found}")
    return BatchSizeError(
        name,
        f"tensor {name!r} has a batch of {size}, but model {spec.name!r} takes 1 to {most}"
        f"{'; infer(..., split=True) sends several requests' if size else ''}",
    )


def _check_none_is_missing(spec: ModelSpec, inputs: Mapping[str, AnyInput]) -> None:
    for name, tensor in spec.inputs.items():
        if not tensor.optional and name not in inputs:
            raise MissingTensorError(name, f"model {spec.name!r} needs input {name!r}, which the call does not have")


def _with_devices(on_host: CallLayout, inputs: Mapping[str, AnyInput], output_devices: Mapping[str, int]) -> CallLayout:
    """Return the layout with the tensors on GPUs added, one after another in the memory of each GPU."""
    lent = tuple([name for name, each in inputs.items() if each.is_lent])
    given = {name: each.device for name, each in inputs.items() if each.device is not None and not each.is_lent}
    devices = tuple(sorted({*given.values(), *output_devices.values()}))
    ends = dict.fromkeys(devices, 0)

    def place(device: int, byte_size: int) -> tuple[int, int]:
        offset = ends[device]
        ends[device] = aligned(offset + byte_size)
        return 1 + devices.index(device), offset

    spans: dict[str, InputSpan] = {}
    for name, each in inputs.items():
        if each.device is None:
            spans[name] = on_host.table.inputs[name]
        elif each.dtype is BYTES:
            raise _strings_on_a_gpu(name)
        elif each.is_lent:
            spans[name] = InputSpan(each.dtype, each.shape, LENT, 0, each.byte_size)
        else:
            spans[name] = InputSpan(each.dtype, each.shape, *place(each.device, each.byte_size), each.byte_size)
    rooms = dict(on_host.table.outputs)
    for name, device in output_devices.items():
        if name in rooms:
            rooms[name] = OutputSpan(*place(device, rooms[name].byte_size), rooms[name].byte_size)
    sizes: Sequence[int] = [max(end, ALIGNMENT) for end in ends.values()]  # CUDA cannot allocate 0 bytes
    return on_host._replace(table=Table(spans, rooms), devices=devices, device_byte_sizes=tuple(sizes), lent=lent)


def _strings_on_a_gpu(name: str) -> TensorTypeError:
    return TensorTypeError(name, f"tensor {name!r} holds strings, which cannot be on a GPU; expected it on the host")


CALLS: Final = 256
"""After this many consecutive calls that needed less, learned sizes become smaller."""


class LearnedSizes:
    """Bytes per row that outputs of one model need, times the head room."""

    def __init__(self, head_room: float) -> None:
        self.per_row: dict[str, int] = {}  # with the head room
        # The bytes per row of all outputs together, for each call since shrink(). A call appends its number if per_row
        # is not empty; after CALLS numbers, shrink() has enough of them.
        self.needed: list[float] = []
        self._head_room = head_room
        self._has_shrunk = False

    def learn(self, byte_sizes: Mapping[str, int], rows: int) -> None:
        """Record the sizes of outputs that found too little room, in a call of ``rows`` rows."""
        for name, byte_size in byte_sizes.items():
            self.per_row[name] = max(math.ceil(byte_size / rows * self._head_room), self.per_row.get(name, 0))
        self.needed.append(sum(byte_sizes.values()) / rows)
        del self.needed[:-CALLS]  # streams never call shrink()

    def shrink(self) -> bool:
        """Lower sizes that are too large, after enough calls; return whether the previous time lowered some."""
        needed = self.needed
        if len(needed) < CALLS:
            return False
        self.needed = []
        most = math.ceil(max(needed) * self._head_room)
        too_large = [name for name, size in list(self.per_row.items()) if size > most]
        self.per_row.update(dict.fromkeys(too_large, most))
        had_shrunk, self._has_shrunk = self._has_shrunk, bool(too_large)
        return had_shrunk
