"""The memories of a slot, host and GPU, in one shape: arrays at offsets, and what a descriptor says of them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..memory.cuda.events import EventListener
from ..memory.cuda.memory import CudaAllocation
from ..memory.cuda.runtime import device_guard

__all__ = ["DeviceSpace", "HostSpace", "Space"]


class Space(Protocol):
    """A memory of a slot.

    Attributes
    ----------
    begin : int
        Where data begins in the region, as a descriptor counts.
    byte_size : int
        Of the region.
    """

    @property
    def begin(self) -> int: ...

    @property
    def byte_size(self) -> int: ...

    def finish_writing(self) -> None:
        """Wait until what this thread has written to it can be read by another process."""

    def array_at(self, memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array at an offset from the region's beginning.

        It keeps ``memory`` alive, the slot's region on the host: while that lives, the slot is not given back.
        """


class HostSpace:
    """The slot's managed region."""

    def __init__(self, begin: int, byte_size: int) -> None:
        self.begin = begin
        self.byte_size = byte_size

    def array_at(
        self, memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """Return a view of ``memory``."""
        view: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
        return view

    def finish_writing(self) -> None:
        """Do nothing: what this process has written is there."""


class DeviceSpace:
    """What the slot has on a GPU."""

    begin = 0

    def __init__(self, allocation: CudaAllocation, listener: EventListener) -> None:
        self.allocation = allocation
        self.listener = listener
        self.byte_size = allocation.byte_size

    def array_at(self, memory: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array of CuPy on the GPU."""
        size = self.byte_size - offset
        array = self.allocation.array_at(offset, dtype, shape, size, memory)
        if array is None:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return array

    def finish_writing(self) -> None:
        """Wait until the inputs that were put on the thread's current stream are written."""
        runtime = self.allocation.runtime
        with device_guard(runtime, self.allocation.device):
            runtime.synchronize(runtime.stream_address(runtime.current_stream()))
