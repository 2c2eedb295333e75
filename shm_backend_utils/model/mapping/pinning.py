"""Pinned host memory: a mapped region that is registered with CUDA, so that copies to a GPU need no staging buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...errors import MachineError
from ...memory.cuda.memory import CudaAccess

__all__ = ["Pin", "Pinning"]


class Pin:
    """One registration with CUDA, to be undone before the memory is unmapped."""

    def __init__(self, cuda: CudaAccess, address: int) -> None:
        self._cuda = cuda
        self._address = address

    def undo(self) -> None:
        """Make the memory pageable again."""
        self._cuda.runtime.unpin(self._address)


class Pinning:
    """Pins whole regions. What cannot be pinned stays as it is, which is slower and right.

    Parameters
    ----------
    cuda : CudaAccess
        Loaded at the first region.
    warn : callable
        Is told, once, why memory cannot be pinned.
    """

    def __init__(self, cuda: CudaAccess, warn: Callable[[str], None]) -> None:
        self._cuda = cuda
        self._warn = warn
        self._has_warned = False

    def pin(self, memory: npt.NDArray[np.uint8]) -> Pin | None:
        """Pin a whole mapping; return None if that cannot be."""
        address: int = memory.__array_interface__["data"][0]
        try:
            self._cuda.runtime.pin(address, memory.nbytes)
        except MachineError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"SHM_PIN_HOST_MEMORY: memory stays pageable: {error}")
            return None
        return Pin(self._cuda, address)
