"""Pinned host memory: a mapped region that is registered with CUDA, so that copies to a GPU need no staging buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...errors import MachineError
from ...memory.cuda.access import CudaAccess
from ...memory.cuda.runtime import CudaRuntime

__all__ = ["Pin", "Pinning"]


class Pin:
    """One registration of memory with CUDA, which keeps the memory until it is undone."""

    def __init__(self, runtime: CudaRuntime, memory: npt.NDArray[np.uint8]) -> None:
        self._runtime = runtime
        self._memory = memory

    def undo(self) -> None:
        """Have the memory made pageable, and then let go of, with the next ``collect``. Waits for nothing.

        The calls that have copied from there or to there are over, and their copies with them.
        """
        self._runtime.retired.add_idle(self._unpin)

    def _unpin(self) -> None:
        self._runtime.unpin(_address_of(self._memory))


class Pinning:
    """Pins whole regions. What cannot be pinned stays as it is, which is slower and right; ``warn`` is told once why.

    CUDA is loaded at the first region.
    """

    def __init__(self, cuda: CudaAccess, warn: Callable[[str], None]) -> None:
        self._cuda = cuda
        self._warn = warn
        self._has_warned = False

    def pin(self, memory: npt.NDArray[np.uint8]) -> Pin | None:
        """Pin a whole mapping; return None if that cannot be."""
        try:
            runtime = self._cuda.runtime
            runtime.pin(_address_of(memory), memory.nbytes)
        except MachineError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"SHM_PIN_HOST_MEMORY: memory stays pageable: {error}")
            return None
        return Pin(runtime, memory)


def _address_of(memory: npt.NDArray[np.uint8]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
