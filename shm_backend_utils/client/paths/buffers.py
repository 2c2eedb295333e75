"""Buffers of a call beside the region that its slot is in: where inputs and outputs may lie, too.

A buffer goes back when no array over it lives, and the call's slot is free: that keeps it while a model may be at work.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...memory.cuda.runtime import CudaRuntime
from ...memory.managed import array_at
from ...memory.pool.slot import SlotRegion
from ...protocol.claims import LentRegionClaim
from ...tensors.cuda.device_array import DeviceArray
from ...tensors.cuda.libraries import as_library

__all__ = ["Buffer", "GpuBuffer", "RegionBuffer"]


class Buffer(Protocol):
    """One of a table's further regions, as the client has it that made the table."""

    byte_size: int

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array over the memory, which keeps ``owner``, too; ValueError if it would end beyond it."""

    def fence(self) -> bool:
        """As of :class:`.Fenced`."""


class RegionBuffer:
    """A region of the client's pool that a request uses beside the one that its slot is in.

    Its one slot no request names. It is given back when ``memory``, the whole region, and every array of that are gone.
    """

    def __init__(self, region: SlotRegion, memory: npt.NDArray[np.uint8]) -> None:
        self.region = region
        self.memory = memory
        self.byte_size = region.byte_size

    @property
    def claim(self) -> LentRegionClaim:
        """What a table says of it."""
        return LentRegionClaim(self.region.key, self.region.byte_size, self.region.token, 0, fence=0)

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """As of :class:`Buffer`."""
        size = self.memory.nbytes - offset
        array = array_at(np.asarray(_Keeper(self.memory, owner)), offset, dtype, shape, size)
        if array is None:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return array

    def fence(self) -> bool:
        """As of :class:`.Fenced`: models of earlier releases borrow its own slot."""
        return self.region.slots[0].fence()


class GpuBuffer:
    """Memory of a GPU: the slot's own, or a user's. ``keeper`` keeps it; without a library, arrays are DeviceArrays."""

    def __init__(
        self, runtime: CudaRuntime, address: int, byte_size: int, device: int, keeper: object, library: str | None
    ) -> None:
        self.runtime = runtime
        self.address = address
        self.byte_size = byte_size
        self.device = device
        self._keeper = keeper
        self._library = library

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As of :class:`Buffer`."""
        array = self.plain_array_at(owner, offset, dtype, shape)
        return array if self._library is None else as_library(array, self._library)

    def fence(self) -> bool:
        """As of :class:`.Fenced`: models that use it borrow the call's slot."""
        return True

    def plain_array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """As :meth:`array_at`, of no library."""
        size = self.byte_size - offset
        if math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return DeviceArray(self.runtime, self.address + offset, shape, dtype, self.device, (self._keeper, owner))


class _Keeper:
    """What NumPy makes an array of memory from, which keeps this, and so an owner as well."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, memory: npt.NDArray[np.uint8], owner: object) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._owner = memory, owner
