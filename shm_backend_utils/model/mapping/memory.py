"""The memory of a mapped region, on the host or on a GPU, behind one interface; input views; pinning."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES, DType
from ...errors import MachineError
from ...gpu.arrays.device_array import DeviceArray
from ...gpu.arrays.device_view import DeviceView
from ...gpu.memory.access import CudaAccess
from ...gpu.memory.mappings import CudaMapping
from ...memory.managed import array_at
from ...protocol.spans import Table
from ...tensors.strings import Strings
from ...tensors.view import DIRECT, MemoryType, StringsView, TensorView

__all__ = ["DeviceMemory", "HostMemory", "InputView", "MappedMemory", "Pinning"]


class InputView(TensorView):
    """An input, not of strings, that lies in the client's host memory."""

    __slots__ = ("table",)

    table: Table  # the table of the input's request: put() passes on memory of the same request only


class HostMemory:
    """Host memory: a whole mapping, or ``byte_size`` bytes of it from ``begin`` on. Every view keeps it mapped."""

    __slots__ = ("address", "array", "begin", "byte_size", "data_begin", "device", "memory_type")

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        memory_type: MemoryType = MemoryType.CPU,
        begin: int = 0,
        byte_size: int | None = None,
        data_begin: int = 0,
    ) -> None:
        self.array = array
        self.memory_type = memory_type
        self.begin = begin
        self.byte_size = array.nbytes - begin if byte_size is None else byte_size
        self.data_begin = data_begin  # the smallest offset that a tensor may have
        self.address: int = array.__array_interface__["data"][0] + begin  # the address of offset 0
        self.device = None

    def part(self, begin: int, byte_size: int) -> HostMemory:
        """Return the part of ``byte_size`` bytes from an offset on; tensors may lie anywhere in this part."""
        return HostMemory(self.array, self.memory_type, self.begin + begin, byte_size)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return the memory as a writable array of bytes."""
        return self.array[self.begin : self.begin + self.byte_size]

    def view(
        self, name: str, offset: int, byte_size: int, dtype: DType, shape: tuple[int, ...], *, writable: bool
    ) -> TensorView | None:
        """Return a tensor at an offset; None if the tensor needs more than ``byte_size`` bytes."""
        begin = self.begin + offset
        if dtype is BYTES:
            encoded = self.array[begin : begin + byte_size]
            return StringsView(name, Strings.encoded_as(name, encoded, shape), DIRECT, self.memory_type)
        array = array_at(self.array, begin, dtype.numpy, shape, byte_size)
        if array is None:
            return None
        array.setflags(write=writable)
        return TensorView(name, array, dtype, DIRECT, self.memory_type)

    def offset_of(self, array: Any) -> int | None:
        """Return the offset of a C-contiguous array, which may be outside this memory; None for any other array."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return None
        return int(array.__array_interface__["data"][0] - self.address)

    def follows(self, other: MappedMemory) -> bool:
        """Return whether this memory and ``other`` lie in one mapping, so that one view can cover spans of both."""
        return isinstance(other, HostMemory) and other.array is self.array


class DeviceMemory:
    """GPU memory: the mapped allocation of another process, or the part of the allocation that a request names."""

    __slots__ = ("address", "begin", "byte_size", "data_begin", "device", "mapping")

    def __init__(self, mapping: CudaMapping, begin: int, byte_size: int) -> None:
        self.mapping = mapping
        self.begin = begin
        self.byte_size = byte_size
        self.data_begin = 0
        self.address = mapping.address + begin
        self.device = mapping.device  # this process' number of the GPU

    def part(self, begin: int, byte_size: int) -> DeviceMemory:
        return DeviceMemory(self.mapping, self.begin + begin, byte_size)

    def bytes(self) -> Any:
        return self._array(self.address, (self.byte_size,), np.dtype(np.uint8), writable=True)

    def view(
        self, name: str, offset: int, byte_size: int, dtype: DType, shape: tuple[int, ...], *, writable: bool
    ) -> TensorView | None:
        """Return a tensor at an offset; None for strings, or if the tensor needs more than ``byte_size`` bytes."""
        if dtype is BYTES or math.prod(shape) * dtype.itemsize > byte_size:
            return None
        array = self._array(self.address + offset, shape, dtype.numpy, writable=writable)
        return DeviceView(name, array, dtype, DIRECT, handle=self.mapping.handle)

    def offset_of(self, array: Any) -> int | None:
        return array.address - self.address if isinstance(array, DeviceArray) else None

    def follows(self, other: MappedMemory) -> bool:
        return isinstance(other, DeviceMemory) and other.mapping.identity == self.mapping.identity

    def _array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, writable: bool) -> DeviceArray:
        """Return an array that keeps the memory mapped, even after the mapping is closed."""
        mapping = self.mapping
        return DeviceArray(
            mapping.runtime, address, shape, dtype, mapping.device, mapping.keeper, is_read_only=not writable
        )


MappedMemory = HostMemory | DeviceMemory


class Pinning:
    """Pins whole regions. Regions that CUDA cannot pin stay pageable; ``warn`` gets the first reason."""

    def __init__(self, cuda: CudaAccess, warn: Callable[[str], None]) -> None:
        self._cuda = cuda
        self._warn = warn
        self._has_warned = False

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Pin a whole mapping; return a function that makes the next ``collect`` unpin it, or None if pinning fails."""
        address = memory.__array_interface__["data"][0]
        try:
            runtime = self._cuda.runtime
            runtime.pin(address, memory.nbytes)
        except MachineError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"SHM_PIN_HOST_MEMORY: memory stays pageable: {error}")
            return None

        def unpin(kept: npt.NDArray[np.uint8] = memory) -> None:
            runtime.unpin(address)

        return partial(runtime.retired.add, unpin)
