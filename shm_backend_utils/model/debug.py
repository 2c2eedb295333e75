"""What a session with SHM_DEBUG adds: it finds outputs that were not written, and writes beyond outputs and to inputs.

A call fills an output's memory with random bytes before it hands it out, and notes the bytes beside it and a digest of
each input. When the call commits, the random bytes must be gone, and all the rest unchanged. Memory on GPUs is not
looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import ModelError
from ..protocol.results import OutputPlace
from ..protocol.spans import InputSpan, OutputSpan
from ..tensors.cuda.device_view import DeviceView
from ..tensors.view import TRITON, TensorView
from .call import Call
from .delivered import DeliveredView
from .devices.uses import DeviceUses
from .mapping.memory import HostMemory
from .metrics import MeasuredCall
from .modes.gathering import Gathering, with_rows
from .modes.stream import StreamCall
from .poison import Bytes, Poison, fill_with_noise

__all__ = ["DEBUGGED", "PLAIN", "Classes"]

_GUARD: Final = 256
"""Bytes on each side of an output that are looked after, if so many belong to nobody."""


class GuardedMemory:
    """The memory of one output, filled with random bytes, and what lies beside it.

    Parameters
    ----------
    name : str
        The output's.
    item_size : int
        Bytes of its elements.
    data : numpy.ndarray of uint8
        Its memory.
    beside : iterable of numpy.ndarray of uint8
        What nobody may write to before :meth:`check_guards`.
    """

    def __init__(self, name: str, item_size: int, data: Bytes, beside: Iterable[Bytes]) -> None:
        self._name = name
        self._item_size = item_size
        self._data = data
        self._poison = Poison(data)
        self._guards = [(guard, guard.copy()) for guard in beside if guard.nbytes]

    @classmethod
    def make(cls, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[GuardedMemory, npt.NDArray[Any]]:
        """Return memory of this process for an output, and the array over it."""
        byte_size = math.prod(shape) * dtype.itemsize
        whole = np.empty(byte_size + 2 * _GUARD, np.uint8)
        parts = np.split(whole, [_GUARD, _GUARD + byte_size])
        for guard in (parts[0], parts[2]):
            fill_with_noise(guard)
        return cls(name, dtype.itemsize, parts[1], [parts[0], parts[2]]), np.ndarray(shape, dtype.numpy, whole, _GUARD)

    def is_of(self, view: TensorView) -> bool:
        """Return whether a view is of this very memory."""
        return type(view) is TensorView and (view.array.__array_interface__["data"][0], view.array.nbytes) == (
            self._data.__array_interface__["data"][0],
            self._data.nbytes,
        )

    def check_guards(self) -> None:
        """Raise ModelError if something was written beside the memory."""
        changed = sum(int(np.count_nonzero(guard != before)) for guard, before in self._guards)
        if changed:
            raise ModelError(
                f"model.py wrote beyond output {self._name!r}: of the bytes before and behind its {self._data.nbytes} "
                f"bytes, {changed} have changed; ask call.output() for the shape that is written"
            )

    def check_written(self) -> None:
        """Raise ModelError if some of the memory is as it was handed out."""
        left = self._poison.left(self._item_size)
        if left:
            raise ModelError(
                f"model.py asked for output {self._name!r} and has not written {left} of its "
                f"{self._data.nbytes // self._item_size} elements, where the client would find what was there before; "
                "write into call.output(…).numpy() (y = call.output(…).numpy(); y[...] = x), or give an "
                "array by call.put()"
            )


class DebugCall(Call):
    """A call that looks after the memory of its outputs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._guarded: dict[str, GuardedMemory] = {}
        self._digests: dict[str, bytes] = {}

    def begin(self) -> None:
        super().begin()
        self._digests = {name: _digest(data) for name, data in self._input_bytes()}

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        view = super().output(name, shape, dtype)
        place = self.outputs[name].place
        if place.is_in_response:
            guarded, array = GuardedMemory.make(name, place.dtype, view.shape)
            output = self.outputs[name] = self._in_band(name, place.dtype, array)
            view = output.view
        else:
            memory = self._memories[place.region]
            if not isinstance(memory, HostMemory):
                return view
            data = memory.bytes()[place.offset : place.offset + place.byte_size]
            guarded = GuardedMemory(name, place.dtype.itemsize, data, self._beside(place, memory))
        self._guarded[name] = guarded
        return view

    def put(self, name: str, array: Any) -> None:
        super().put(name, array)
        guarded = self._guarded.get(name)
        if guarded is not None and not guarded.is_of(self.outputs[name].view):
            del self._guarded[name]  # what was handed out is not the output any more

    def commit(self, *, needs_all: bool = True) -> None:
        super().commit(needs_all=needs_all)
        all_guarded, self._guarded = self._guarded, {}
        if all_guarded and self.devices:  # a GPU may be copying to the host
            self.devices.wait()
        for name, data in self._input_bytes():
            if _digest(data) != self._digests[name]:
                raise _input_changed(name)
        requested = self._request.requested_output_names()
        for name, guarded in all_guarded.items():
            guarded.check_guards()
            if name in requested and guarded.is_of(self.outputs[name].view):
                guarded.check_written()

    def _input_bytes(self) -> Iterator[tuple[str, Bytes]]:
        """Yield the bytes of each input on the host. Triton delivers strings as copies, so these are left out."""
        spans = {} if self.table is None else self.table.inputs
        for name, span in spans.items():
            memory = self._memories[span.region]
            if isinstance(memory, HostMemory):
                yield name, memory.bytes()[span.offset : span.offset + span.byte_size]
        for name, tensor in self._delivered_tensors().items():
            view = self._delivered(name) if name not in spans and tensor.is_cpu() else None
            if isinstance(view, DeliveredView):
                yield name, view.numpy().reshape(-1).view(np.uint8)

    def _beside(self, place: OutputPlace, memory: HostMemory) -> list[Bytes]:
        """Return the bytes on both sides of an output that belong to no tensor of any request."""
        everything, room = memory.bytes(), self._rooms[place.name]
        begin, end = place.offset, place.offset + room.byte_size
        slack = everything[begin + place.byte_size : min(end, begin + place.byte_size + _GUARD)]
        fill_with_noise(slack)
        before, behind = self._unused_beside(place.region, begin, end)
        return [everything[max(before, begin - _GUARD) : begin], slack, everything[end : min(behind, end + _GUARD)]]

    def _unused_beside(self, region: int, begin: int, end: int) -> tuple[int, int]:
        """Return from where on before ``begin``, and to where behind ``end``, a region is nobody's."""
        table, slot = self.table, self._slot
        if region or table is None or slot is None or slot.region.managed is None:
            return begin, end  # who knows what else is there
        header, ring = slot.region.managed.header, table.ring
        if header.slot_count != 1 + (0 if ring is None else ring.frames):
            return begin, end  # other slots have their tensors there
        rooms = [table.outputs] if ring is None else [ring.outputs(table.outputs, n) for n in range(ring.frames)]
        spans: list[InputSpan | OutputSpan] = [*table.inputs.values()]
        for each in rooms:
            spans += each.values()
        used = [(span.offset, span.offset + span.byte_size) for span in spans if span.region == 0]
        before = max((last for _, last in used if last <= begin), default=slot.region.managed.data_offset)
        behind = min((first for first, _ in used if first >= end), default=header.byte_size)
        return before, behind


def _digest(data: Bytes) -> bytes:
    return hashlib.blake2b(data.data, digest_size=16).digest()


def _input_changed(name: str) -> ModelError:
    return ModelError(
        f"input {name!r} was changed during the call, most likely by model.py, which may only read it: the memory is "
        "the client's, whose next call over it sends the change, and forward() and put() pass it on; copy it first, as "
        "torch.from_dlpack(view).clone() or np.array(view) does (some libraries do not see that a view is read-only)"
    )


class MeasuredDebugCall(MeasuredCall, DebugCall):
    """Both."""


class DebugStreamCall(DebugCall, StreamCall):
    """A stream that looks after the memory of its outputs, response by response."""


class DebugGathering(Gathering):
    """What one batch copies; the memory of outputs that are taken apart later is looked after."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._guarded: list[GuardedMemory] = []

    def room(self, parts: Sequence[TensorView], shape: tuple[int, ...]) -> TensorView:
        if all(isinstance(part, DeviceView) for part in parts):
            return super().room(parts, shape)
        name, dtype = parts[0].name, dtypes.BY_NAME[parts[0].triton_dtype]
        guarded, array = GuardedMemory.make(name, dtype, shape)
        self._guarded.append(guarded)
        whole = TensorView(name, array, dtype, TRITON)
        for rows, part in with_rows(whole, parts):
            if not isinstance(part, DeviceView):
                # Its random bytes, whatever they mean: each call knows its own.
                rows.reshape(-1).view(np.uint8)[...] = part.numpy().reshape(-1).view(np.uint8)
        return whole

    def scatter(self, pairs: Sequence[tuple[Any, TensorView]], uses: DeviceUses | None = None) -> None:
        for guarded in self._guarded:
            guarded.check_guards()
        super().scatter(pairs, uses)


class Classes(NamedTuple):
    """What a session makes its calls of.

    Attributes
    ----------
    call, measured_call : type of Call
        Without metrics, and with them.
    stream_call : type of StreamCall
    gathering : type of Gathering
    """

    call: type[Call]
    measured_call: type[MeasuredCall]
    stream_call: type[StreamCall]
    gathering: type[Gathering]


PLAIN: Final = Classes(Call, MeasuredCall, StreamCall, Gathering)
DEBUGGED: Final = Classes(DebugCall, MeasuredDebugCall, DebugStreamCall, DebugGathering)
