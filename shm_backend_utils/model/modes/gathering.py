"""Rows of several requests brought together in one buffer, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...memory.managed import array_at
from ...tensors.attributes import MemoryType
from ...tensors.cuda.device_view import DeviceView
from ...tensors.strings import Strings
from ...tensors.strings_view import StringsView
from ...tensors.view import TRITON, TensorView
from ..devices.arrays import DeviceArrays, DeviceUses
from ..mapping.pinning import Pin, Pinning

__all__ = ["Buffers", "Gathering", "with_rows"]


class Buffers:
    """A session's memory for gathered tensors: a buffer for each, used again by every batch, and pinned if wanted."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning
        self._buffers: dict[str, tuple[npt.NDArray[np.uint8], Pin | None]] = {}

    def get(self, name: str, byte_size: int) -> tuple[npt.NDArray[np.uint8], MemoryType]:
        """Return a tensor's buffer, writable, not cleared, and its kind of memory. It serves until the next such call.

        The former buffer of this name is let go of, if it is smaller than ``byte_size``.
        """
        buffer, pin = self._buffers.get(name, (None, None))
        if buffer is None or buffer.nbytes < byte_size:
            if pin is not None:
                pin.undo()
            buffer = np.empty(byte_size + byte_size // 4, np.uint8)
            pin = None if self._pinning is None else self._pinning.pin(buffer)
            self._buffers[name] = buffer, pin
        return buffer, MemoryType.CPU if pin is None else MemoryType.CPU_PINNED

    def close(self) -> None:
        """Let go of all buffers."""
        for _, pin in self._buffers.values():
            if pin is not None:
                pin.undo()
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
