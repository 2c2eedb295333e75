"""Several requests as one batch: one array over all their rows, in the clients' own memory if possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import ModelError
from ...gpu.arrays.device_view import DeviceView
from ...gpu.instance import InstanceGpus
from ...gpu.uses import DeviceUses
from ...protocol.spans import InputSpan, OutputSpan
from ...tensors.strings import Strings
from ...tensors.view import TRITON, MemoryType, StringsView, TensorView
from ..call import Call
from ..call.checks import array_of, check_output
from ..mapping.memory import MappedMemory, Pinning

__all__ = ["BatchCall", "Buffers", "Gathering", "batches_of", "with_rows"]


class BatchCall:
    """Requests of one ``execute`` whose inputs differ in the number of rows only.

    Rows that follow one another in one mapping become one view without a copy.

    Attributes
    ----------
    calls : tuple of Call
        One for each request, with its parameters, its requested outputs, and so on.
    rows : tuple of range
        The rows of each call, in the same order.
    size : int
        The number of rows of the batch.
    """

    def __init__(self, calls: Sequence[Call], gathering: Gathering) -> None:
        ends = list(accumulate(call.batch_size for call in calls))
        self.calls = tuple(calls)
        self.rows = tuple(map(range, [0, *ends], ends))
        self.size = ends[-1]
        self._gathering = gathering
        self._inputs: dict[str, TensorView] = {}
        self._scattered: dict[str, tuple[TensorView, list[TensorView]]] = {}

    def __repr__(self) -> str:
        state = "open" if self.calls[0].is_open else "closed"
        return f"<BatchCall {self.calls[0].spec.name!r} calls={len(self.calls)} rows={self.size} {state}>"

    @property
    def gathered_bytes(self) -> int:
        """The bytes copied so far to gather inputs into one array, or to scatter an output."""
        return self._gathering.byte_count

    def input(self, name: str) -> TensorView:
        """Return one input of all requests, read-only; MissingTensorError if the requests do not have it.

        Its first dimension has all rows. If the rows follow one another in the clients' memory, it is that memory,
        without a copy. Otherwise they are copied once, to a buffer that the next ``execute`` reuses. The buffer is on a
        GPU if all rows are on that GPU. The view is valid until ``infer`` returns.
        """
        found = self._inputs.get(name)
        if found is None:
            if len(self.calls) == 1:
                found = self.calls[0].input(name)
            else:
                lying = [each for call in self.calls if (each := call.span_of(name)) is not None]
                if len(lying) == len(self.calls) and lying[0][1].dtype is not BYTES:
                    span = lying[0][1]
                    found = _as_one(name, lying, span.dtype, (self.size, *span.shape[1:]), writable=False)
            if found is None:
                found = self._gathering.gather([call.input(name) for call in self.calls], self._device_uses())
            self._inputs[name] = found
        return found

    def output(self, name: str, item_shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output of all requests, shape ``(size, *item_shape)``; errors as :meth:`Call.output`.

        It is writable and not cleared. It is the clients' own memory if that is contiguous. Otherwise it is a buffer,
        on a GPU if all rows go to that GPU, and is copied when the batch ends. It is valid until ``infer`` returns.
        """
        item_shape = tuple(map(index, item_shape))
        if len(self.calls) == 1:
            return self.calls[0].output(name, (self.size, *item_shape), dtype)
        numpy_dtype = np.dtype(dtype)
        whole: TensorView | None = None
        pairs = [(call, (len(rows), *item_shape)) for call, rows in zip(self.calls, self.rows, strict=True)]
        kind = check_output(self.calls[0].spec, name, numpy_dtype, pairs[0][1])
        rooms = [] if kind is BYTES else [each for call, shape in pairs if (each := call.room_for(name, kind, shape))]
        if len(rooms) == len(pairs):
            whole = _as_one(name, rooms, kind, (self.size, *item_shape), writable=True)
        parts = [call.output(name, shape, numpy_dtype) for call, shape in pairs]
        if whole is None:
            whole = self._gathering.room(parts, self._device_uses())
            self._scattered[name] = whole, parts
        return whole

    def put(self, name: str, array: Any) -> None:
        """Set one output of all requests, as :meth:`Call.put`; ModelError unless its first dimension has all rows."""
        given = array.numpy() if isinstance(array, Strings) else array
        value = array_of(self.calls[0].spec, name, given, lambda on_gpu: on_gpu)
        if isinstance(value, np.ndarray):
            check_output(self.calls[0].spec, name, value.dtype, value.shape)
        if not value.shape or value.shape[0] != self.size:
            raise ModelError(f"output {name!r} has shape {list(value.shape)}, but the batch has {self.size} rows")
        for call, rows in zip(self.calls, self.rows, strict=True):
            call.put(name, value[rows.start : rows.stop])

    def requested(self, name: str) -> bool:
        """Return whether any client wants this output. You need not compute the others."""
        return any(call.requested(name) for call in self.calls)

    def ready_on(self, cuda_stream: Any) -> None:
        """Name a CUDA stream that does work for the batch, as :meth:`Call.ready_on` does, for all of its calls.

        Name it before you ask for the inputs. The library then gathers rows on the GPU before later work of the stream,
        and the host does not wait.
        """
        self._device_uses()
        for call in self.calls:
            call.ready_on(cuda_stream)

    def scatter(self) -> None:
        """Copy gathered outputs to their places. Only :class:`ShmSession` calls this."""
        for name, (whole, parts) in self._scattered.items():
            pairs = zip(self.calls, with_rows(whole, parts), strict=True)
            # Skip a call that has set the output again: the new output may lie in the same memory.
            there = [pair for call, pair in pairs if call.outputs[name].view is pair[1]]
            self._gathering.scatter(there, self._device_uses())

    def _device_uses(self) -> DeviceUses | None:
        """Return one object for the GPU uses of all calls, so that all copies are in order; None if none uses a GPU."""
        noted = [call.devices for call in self.calls if call.devices is not None]
        for each in noted[1:]:
            if each is not noted[0]:
                noted[0].join(each)
        for call in self.calls if noted else ():
            call.devices = noted[0]
        return noted[0] if noted else None


def batches_of(calls: Iterable[Call], fail: Callable[[Call, BaseException], None]) -> list[list[Call]]:
    """Begin calls and group those whose inputs differ in rows only, in memory order; ``fail`` takes refused calls."""
    batches: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        try:
            call.begin()
            call.read_strings()
            _ = call.batch_size  # raises if the request has no input
            kind = _kind(call)
        except BaseException as error:  # one refused request must not fail the others
            fail(call, error)
        else:
            batches.setdefault(kind, []).append(call)
    return [sorted(batch, key=_address) for batch in batches.values()]


def _kind(call: Call) -> tuple[Any, ...]:
    """Return the names and data types of a call's inputs, and their shapes without the rows."""
    kind = []
    for name in call.spec.inputs:
        lying = call.span_of(name)
        if lying is not None:
            kind.append((name, lying[1].dtype.name, lying[1].shape[1:]))
        else:
            view = call.find_input(name)
            if view is not None:
                kind.append((name, view.triton_dtype, view.shape[1:]))
    return tuple(kind)


def _address(call: Call) -> tuple[int, int]:
    """Return a sort key: the address of a call's first input in the client's memory; calls without one come last."""
    for name in call.spec.inputs:
        lying = call.span_of(name)
        if lying is not None:
            memory, span = lying
            return 0, memory.address + span.offset
    return 1, 0


def _as_one(
    name: str,
    places: Sequence[tuple[MappedMemory, InputSpan | OutputSpan]],
    dtype: DType,
    shape: tuple[int, ...],
    *,
    writable: bool,
) -> TensorView | None:
    """Return the rows of several requests as one view; None unless these rows follow one another in one mapping."""
    memory, begin = places[0][0], places[0][1].offset
    end = memory.address + begin
    for each, span in places:
        if each.address + span.offset != end or not each.follows(memory):
            return None
        end += span.byte_size
    return memory.view(name, begin, end - memory.address - begin, dtype, shape, writable=writable)


class Buffers:
    """A session's buffers, one for each gathered tensor. Every batch reuses the buffers; ``pinning`` pins them."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning
        self._buffers: dict[str, tuple[npt.NDArray[np.uint8], Callable[[], None] | None]] = {}

    def get(self, name: str, byte_size: int) -> tuple[npt.NDArray[np.uint8], MemoryType]:
        """Return a tensor's buffer, not cleared, valid until the next call with this name, and its memory type."""
        buffer, unpin = self._buffers.get(name, (None, None))
        if buffer is None or buffer.nbytes < byte_size:
            if unpin is not None:
                unpin()
            buffer = np.empty(byte_size + byte_size // 4, np.uint8)
            unpin = None if self._pinning is None else self._pinning.pin(buffer)
            self._buffers[name] = buffer, unpin
        return buffer, MemoryType.CPU if unpin is None else MemoryType.CPU_PINNED

    def close(self) -> None:
        for _, unpin in self._buffers.values():
            if unpin is not None:
                unpin()
        self._buffers.clear()


class Gathering:
    """The copies of one batch; ``number``, its index in the ``execute``, selects its buffers."""

    def __init__(self, buffers: Buffers, arrays: InstanceGpus, number: int) -> None:
        self.byte_count = 0
        # Each batch of an ``execute`` has its own buffers: Triton reads them only when all batches have been served.
        self._number = number
        self._buffers = buffers
        self._arrays = arrays

    def gather(self, parts: Sequence[TensorView], uses: DeviceUses | None = None) -> TensorView:
        """Return tensors of one name and dtype, concatenated along the first axis; read-only if on the host."""
        head = parts[0]
        if isinstance(head, StringsView):
            elements = np.concatenate([part.numpy() for part in parts])
            return StringsView(head.name, Strings.of(head.name, elements), TRITON)
        whole = self._empty("input", parts, uses)
        if isinstance(whole, DeviceView):
            self._arrays.copy_all([(rows, part.array) for rows, part in with_rows(whole, parts)], uses)
        else:
            for rows, part in with_rows(whole, parts):
                np.copyto(rows, self._arrays.to_host(part, uses) if isinstance(part, DeviceView) else part.numpy())
            whole.array.flags.writeable = False
            if uses is not None:  # a GPU may read a pinned buffer later, and the next batch overwrites it
                uses.reads_host |= whole.attributes.memory_type is MemoryType.CPU_PINNED
        self.byte_count += whole.attributes.byte_size
        return whole

    def room(self, parts: Sequence[TensorView], uses: DeviceUses | None = None) -> TensorView:
        """Return writable memory for all rows of an output, which :meth:`scatter` later splits."""
        return self._empty("output", parts, uses)

    def scatter(self, pairs: Sequence[tuple[Any, TensorView]], uses: DeviceUses | None = None) -> None:
        """Copy rows of memory from :meth:`room` to their places, as :func:`with_rows` pairs them."""
        self._arrays.copy_all([(part.array, rows) for rows, part in pairs if isinstance(part, DeviceView)], uses)
        for rows, part in pairs:
            if not isinstance(part, DeviceView):
                np.copyto(part.numpy(), rows)
            self.byte_count += rows.nbytes

    def _empty(self, use: str, parts: Sequence[TensorView], uses: DeviceUses | None) -> TensorView:
        """Return memory for all rows, valid until the next batch of this number: on a GPU if that GPU has all parts."""
        head = parts[0]
        shape, dtype = (sum([part.shape[0] for part in parts]), *head.shape[1:]), dtypes.BY_NAME[head.triton_dtype]
        devices = {part.device if isinstance(part, DeviceView) else None for part in parts}
        device = devices.pop()
        if device is not None and not devices:
            return self._arrays.empty(head.name, shape, dtype, TRITON, device, uses)
        buffer, memory_type = self._buffers.get(f"{self._number} {use} {head.name}", math.prod(shape) * dtype.itemsize)
        return TensorView(head.name, np.ndarray(shape, dtype.numpy, buffer), dtype, TRITON, memory_type)


def with_rows(whole: TensorView, parts: Sequence[TensorView]) -> list[tuple[Any, TensorView]]:
    """Return pairs: the rows of the whole that belong to a part, and that part."""
    begin, pairs = 0, []
    for part in parts:
        end = begin + part.shape[0]
        pairs.append((whole.array[begin:end], part))
        begin = end
    return pairs
