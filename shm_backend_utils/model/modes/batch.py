"""Several requests as one batch: one array over all their rows, in the clients' own memory where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES
from ...errors import ModelError
from ...gpu.arrays.device_view import DeviceView
from ...gpu.model import DeviceArrays, DeviceUses, shared_by
from ...memory.managed import array_at
from ...tensors.attributes import MemoryType
from ...tensors.strings import Strings
from ...tensors.strings_view import StringsView
from ...tensors.view import TRITON, TensorView
from ..call import Call
from ..call.answered import array_of, check_output
from ..mapping.memory import Memory, Pinning

__all__ = ["BatchCall", "Buffers", "Gathering", "batches_of", "with_rows"]


class BatchCall:
    """The requests of one ``execute`` that have the same inputs, but for their rows.

    Rows that follow one another in one mapping are one view: that is arithmetic, done anew for every batch.

    Attributes
    ----------
    calls : tuple of Call
        One for each request: its parameters, what it wants, and more.
    rows : tuple of range
        Which rows are whose, in the same order.
    size : int
        How many rows there are.
    """

    def __init__(self, calls: Sequence[Call], gathering: Gathering) -> None:
        self.calls = tuple(calls)
        self.rows = _rows([call.batch_size for call in calls])
        self.size = self.rows[-1].stop
        self._gathering = gathering
        self._inputs: dict[str, TensorView] = {}
        self._scattered: dict[str, tuple[TensorView, list[TensorView]]] = {}

    def __repr__(self) -> str:
        state = "open" if self.calls[0].is_open else "closed"
        return f"<BatchCall {self.calls[0].spec.name!r} calls={len(self.calls)} rows={self.size} {state}>"

    @property
    def gathered_bytes(self) -> int:
        """Bytes that were copied so far to make one array of several, or several of one."""
        return self._gathering.byte_count

    def input(self, name: str) -> TensorView:
        """Return one input of all requests.

        Parameters
        ----------
        name : str
            As in the model's configuration.

        Returns
        -------
        TensorView
            C-contiguous and read-only; its first dimension has all rows. It is the clients' memory, without any copy,
            where the rows follow one another there; else they are copied to a buffer, once, which the next ``execute``
            uses again: on a GPU, if all of them are on that one. Valid until ``infer`` returns.

        Raises
        ------
        MissingTensorError
            The requests do not have it.
        """
        found = self._inputs.get(name)
        if found is None:
            found = self._joined_input(name)
            if found is None:
                parts = [call.input(name) for call in self.calls]
                found = self._gathering.gather(parts, self.size, self._device_uses())
            self._inputs[name] = found
        return found

    def output(self, name: str, item_shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output of all requests.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        item_shape : sequence of int
            Of a row. Integers of NumPy are fine.
        dtype : numpy.dtype or what makes one
            Of the elements.

        Returns
        -------
        TensorView
            C-contiguous and writable, not cleared, of shape ``(size, *item_shape)``. It is the clients' own memory
            where that is contiguous; else it is copied there when the batch ends, and on a GPU if all of it goes to
            that one. Valid until ``infer`` returns.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        item_shape = tuple(map(index, item_shape))
        if len(self.calls) == 1:
            return self.calls[0].output(name, (self.size, *item_shape), dtype)
        kind = np.dtype(dtype)
        whole = self._joined_output(name, item_shape, kind)
        if whole is not None:
            return whole
        parts = [
            call.output(name, (len(rows), *item_shape), kind) for call, rows in zip(self.calls, self.rows, strict=True)
        ]
        whole = self._gathering.room(parts, (self.size, *parts[0].shape[1:]))
        self._scattered[name] = whole, parts
        return whole

    def put(self, name: str, array: Any) -> None:
        """Give one output of all requests.

        Parameters
        ----------
        name : str
            As in the model's configuration.
        array
            As of :meth:`Call.put`. Its first dimension has all rows.

        Raises
        ------
        ModelError
            As for :meth:`output`; or there are more rows, or fewer.
        """
        given = array.numpy() if isinstance(array, Strings) else array
        value = array_of(self.calls[0].spec, name, given, lambda on_gpu: on_gpu)
        if isinstance(value, np.ndarray):
            check_output(self.calls[0].spec, name, value.dtype, value.shape)
        if not value.shape or value.shape[0] != self.size:
            raise ModelError(f"output {name!r} has shape {list(value.shape)}, but the batch has {self.size} rows")
        for call, rows in zip(self.calls, self.rows, strict=True):
            call.put(name, value[rows.start : rows.stop])

    def requested(self, name: str) -> bool:
        """Return whether any client wants this output. Others need not be computed."""
        return any(call.requested(name) for call in self.calls)

    def ready_on(self, stream: Any) -> None:
        """Name a stream of a GPU that the batch's work is on: as :meth:`Call.ready_on`, for all of its calls.

        Name it before the inputs are asked for: rows that are gathered on the GPU are then copied before what is put on
        the stream later, while the host goes on.
        """
        self._device_uses()
        for call in self.calls:
            call.ready_on(stream)

    def scatter(self) -> None:
        """Copy outputs that are not where they belong. Only :class:`ShmSession` calls this."""
        for name, (whole, parts) in self._scattered.items():
            pairs = zip(self.calls, with_rows(whole, parts), strict=True)
            # Not to a call that was given another output since: that may lie in the same memory.
            there = [pair for call, pair in pairs if call.outputs[name].view is pair[1]]
            self._gathering.scatter(there, self._device_uses())

    def _device_uses(self) -> DeviceUses | None:
        """Return what all calls have to do with GPUs, as one: a copy for one is in order for all; None if nothing."""
        uses = shared_by(call.devices for call in self.calls)
        if uses is not None:
            for call in self.calls:
                call.devices = uses
        return uses

    def _joined_input(self, name: str) -> TensorView | None:
        if len(self.calls) == 1:
            return self.calls[0].input(name)
        parts: list[Part] = []
        for call in self.calls:
            found = call.span_of(name)
            if found is None or found[1].dtype is BYTES:
                return None
            memory, span = found
            parts.append((memory, span.offset, span.byte_size))
        if not _follow_one_another(parts):
            return None
        memory, begin, _ = parts[0]
        shape = (self.size, *span.shape[1:])
        byte_size = sum(size for _, _, size in parts)
        return memory.view(name, begin, byte_size, span.dtype, shape, writable=False)

    def _joined_output(self, name: str, item_shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorView | None:
        """Return the clients' memory for an output as one view, and note that it is there; None if it is not one."""
        found = []
        for call, rows in zip(self.calls, self.rows, strict=True):
            shape = (len(rows), *item_shape)
            row = check_output(call.spec, name, dtype, shape)
            room = None if row is BYTES else call.room_for(name, row, shape)
            if room is None:
                return None
            memory, span = room
            found.append((memory, span.offset, span.byte_size))
        if not _follow_one_another(found):
            return None
        memory, begin, _ = found[0]
        byte_size = sum(size for _, _, size in found)
        whole = memory.view(name, begin, byte_size, row, (self.size, *item_shape), writable=True)
        assert whole is not None
        for call, rows in zip(self.calls, self.rows, strict=True):
            call.output(name, (len(rows), *item_shape), dtype)
        return whole


def batches_of(calls: Iterable[Call], fail: Callable[[Call, BaseException], None]) -> list[list[Call]]:
    """Return calls in batches: those whose inputs are equal but for their rows, in the order of their memory.

    What a model reads of a batch cannot fail for one request then: strings are read here, once. ``fail`` takes a call
    that has no inputs, or strings that cannot be read, and the error; such a call is in no batch.
    """
    batches: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        try:
            call.read_strings()
            _ = call.batch_size  # or it says what it lacks
            kind = _kind(call)
        except BaseException as error:  # it may not disturb the others
            fail(call, error)
        else:
            batches.setdefault(kind, []).append(call)
    return [sorted(batch, key=_address) for batch in batches.values()]


def _kind(call: Call) -> tuple[Any, ...]:
    """Return names, data types and shapes of a call's inputs, but for their rows."""
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
    """Return where a call's first input lies, so that as many as can be follow one another; others come last."""
    for name in call.spec.inputs:
        lying = call.span_of(name)
        if lying is not None:
            memory, span = lying
            return 0, memory.address + span.offset
    return 1, 0


Part = tuple[Memory, int, int]
"""Rows of one request: memory, offset and bytes."""


def _follow_one_another(parts: Sequence[Part]) -> bool:
    first, begin, size = parts[0]
    end = first.address + begin + size
    for memory, offset, byte_size in parts[1:]:
        if memory.address + offset != end or not memory.follows(first):
            return False
        end += byte_size
    return True


def _rows(sizes: Sequence[int]) -> tuple[range, ...]:
    rows, begin = [], 0
    for size in sizes:
        rows.append(range(begin, begin + size))
        begin += size
    return tuple(rows)


class Buffers:
    """A session's memory for gathered tensors: a buffer for each, used again by every batch, and pinned if wanted."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning
        self._buffers: dict[str, tuple[npt.NDArray[np.uint8], Callable[[], None] | None]] = {}

    def get(self, name: str, byte_size: int) -> tuple[npt.NDArray[np.uint8], MemoryType]:
        """Return a tensor's buffer, writable, not cleared, and its kind of memory. It serves until the next such call.

        The former buffer of this name is let go of, if it is smaller than ``byte_size``.
        """
        buffer, unpin = self._buffers.get(name, (None, None))
        if buffer is None or buffer.nbytes < byte_size:
            if unpin is not None:
                unpin()
            buffer = np.empty(byte_size + byte_size // 4, np.uint8)
            unpin = None if self._pinning is None else self._pinning.pin(buffer)
            self._buffers[name] = buffer, unpin
        return buffer, MemoryType.CPU if unpin is None else MemoryType.CPU_PINNED

    def close(self) -> None:
        """Let go of all buffers."""
        for _, unpin in self._buffers.values():
            if unpin is not None:
                unpin()
        self._buffers.clear()


class Gathering:
    """What one batch copies.

    ``number`` is the batch's in its ``execute``. Each has buffers of its own: what is passed on from them in band,
    Triton reads when all batches have been served.
    """

    def __init__(self, buffers: Buffers, arrays: DeviceArrays, number: int) -> None:
        self.byte_count = 0
        self._number = number
        self._buffers = buffers
        self._arrays = arrays

    def gather(self, parts: Sequence[TensorView], row_count: int, uses: DeviceUses | None = None) -> TensorView:
        """Return tensors of one name and dtype, along the first axis, as one: on a GPU if all are on that one.

        It is C-contiguous, read-only on the host, and valid until the next batch of this number.
        """
        head = parts[0]
        if isinstance(head, StringsView):
            elements = np.concatenate([part.numpy() for part in parts])
            return StringsView(head.name, Strings.of(head.name, elements), TRITON)
        shape, dtype = (row_count, *head.shape[1:]), dtypes.BY_NAME[head.triton_dtype]
        device = _device_of_all(parts)
        if device is not None:
            whole: TensorView = self._arrays.empty(head.name, shape, dtype, TRITON, device)
            self._arrays.copy_all([(rows, part.array) for rows, part in with_rows(whole, parts)], uses)
        else:
            whole = self._host_room(f"{self._number} input {head.name}", head.name, shape, dtype)
            for rows, part in with_rows(whole, parts):
                np.copyto(rows, self._arrays.to_host(part, uses) if isinstance(part, DeviceView) else part.numpy())
            whole.array.flags.writeable = False
        self.byte_count += whole.attributes.byte_size
        return whole

    def room(self, parts: Sequence[TensorView], shape: tuple[int, ...]) -> TensorView:
        """Return memory of this shape for what :meth:`scatter` will take apart; ``parts`` say its name and dtype.

        It is on a GPU if all rows go to that one; C-contiguous and writable, not cleared; valid until the next batch of
        this number.
        """
        head = parts[0]
        dtype, device = dtypes.BY_NAME[head.triton_dtype], _device_of_all(parts)
        if device is not None:
            return self._arrays.empty(head.name, shape, dtype, TRITON, device)
        return self._host_room(f"{self._number} output {head.name}", head.name, shape, dtype)

    def scatter(self, pairs: Sequence[tuple[Any, TensorView]], uses: DeviceUses | None = None) -> None:
        """Copy rows of what :meth:`room` has returned, as :func:`with_rows` pairs them with where they go."""
        self._arrays.copy_all([(part.array, rows) for rows, part in pairs if isinstance(part, DeviceView)], uses)
        for rows, part in pairs:
            if not isinstance(part, DeviceView):
                np.copyto(part.numpy(), rows)
            self.byte_count += rows.nbytes

    def _host_room(self, key: str, name: str, shape: tuple[int, ...], dtype: dtypes.DType) -> TensorView:
        byte_size = int(np.prod(shape)) * dtype.itemsize
        buffer, memory_type = self._buffers.get(key, byte_size)
        array = array_at(buffer, 0, dtype.numpy, shape, byte_size)
        assert array is not None
        return TensorView(name, array, dtype, TRITON, memory_type)


def _device_of_all(parts: Sequence[TensorView]) -> int | None:
    """Return the GPU that all tensors are on; None if some are on another one, or on the host."""
    devices = {part.device if isinstance(part, DeviceView) else None for part in parts}
    return devices.pop() if len(devices) == 1 else None


def with_rows(whole: TensorView, parts: Sequence[TensorView]) -> list[tuple[Any, TensorView]]:
    """Return each part with the rows of the whole that are its."""
    begin, pairs = 0, []
    for part in parts:
        end = begin + part.shape[0]
        pairs.append((whole.array[begin:end], part))
        begin = end
    return pairs
