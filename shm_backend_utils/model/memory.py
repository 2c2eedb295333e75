"""The memory of a mapped region, on the host or on a GPU, in one shape: views at offsets, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import BYTES, DType
from ..memory.cuda.memory import CudaMapping
from ..memory.managed import array_at
from ..tensors.attributes import BufferAttributes, MemoryType
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .device_view import DeviceView

__all__ = ["DeviceMemory", "HostMemory", "Memory"]


class HostMemory:
    """Bytes of the host."""

    device = None

    def __init__(self, memory: npt.NDArray[np.uint8], memory_type: MemoryType = MemoryType.CPU) -> None:
        self._memory = memory
        self._type = memory_type

    def part(self, begin: int, end: int) -> HostMemory:
        """Return the same memory between two offsets."""
        return HostMemory(self._memory[begin:end], self._type)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return all of it as an array of bytes, writable."""
        return self._memory

    def attributes(self) -> BufferAttributes:
        """Return what it is."""
        return BufferAttributes(self._type, 0, self._memory.nbytes)

    def view(
        self, name: str, path: str, offset: int, byte_size: int, dtype: DType, shape: tuple[int, ...], *, writable: bool
    ) -> TensorView | None:
        """Return a tensor at an offset; None if it would need more than ``byte_size`` bytes."""
        if dtype is BYTES:
            return StringsView(
                name, Strings.encoded_as(name, self._memory[offset : offset + byte_size], shape), path, self._type
            )
        array = array_at(self._memory, offset, dtype.numpy, shape, byte_size)
        if array is None:
            return None
        array.flags.writeable = writable
        return TensorView(name, array, dtype, path, self._type)

    def offset_of(self, array: Any) -> int | None:
        """Return where in this memory a C-contiguous array begins, maybe beyond it; None for any other array."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return None
        return int(array.__array_interface__["data"][0] - self._memory.__array_interface__["data"][0])


class DeviceMemory:
    """Bytes of a GPU."""

    def __init__(self, mapping: CudaMapping, begin: int, end: int) -> None:
        self._mapping = mapping
        self._begin = begin
        self._end = end
        self.device = mapping.device

    def part(self, begin: int, end: int) -> DeviceMemory:
        """Return the same memory between two offsets."""
        return DeviceMemory(self._mapping, self._begin + begin, self._begin + end)

    def bytes(self) -> Any:
        """Return all of it as an array of bytes."""
        size = self._end - self._begin
        return self._mapping.array_at(self._begin, np.dtype(np.uint8), (size,), size)

    def attributes(self) -> BufferAttributes:
        """Return what it is."""
        return BufferAttributes(MemoryType.GPU, self.device, self._end - self._begin, self._mapping.handle)

    def view(
        self, name: str, path: str, offset: int, byte_size: int, dtype: DType, shape: tuple[int, ...], *, writable: bool
    ) -> TensorView | None:
        """Return a tensor at an offset; None if it would need more than ``byte_size`` bytes, or is no tensor here."""
        if dtype is BYTES:
            return None
        mapping = self._mapping
        array = mapping.array_at(self._begin + offset, dtype.numpy, shape, byte_size)
        if array is None:
            return None
        return DeviceView(
            name, array, dtype, path, mapping.runtime, mapping.device, writable=writable, handle=mapping.handle
        )

    def offset_of(self, array: Any) -> int | None:
        """Return where in this memory a C-contiguous array begins, maybe beyond it; None for any other array."""
        runtime = self._mapping.runtime
        if isinstance(array, np.ndarray) or not runtime.is_contiguous(array):
            return None
        return runtime.address_of(array) - self._mapping.address - self._begin


Memory = HostMemory | DeviceMemory
