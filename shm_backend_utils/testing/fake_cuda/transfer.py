"""Copies between the host and the fake GPU, and the host memory that is pinned for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .device_array import FakeDeviceArray
from .memories import failure

__all__ = ["Array", "PinnedMemory", "transfer"]


Array = FakeDeviceArray | npt.NDArray[Any]


def transfer(target: Array, source: Array) -> Callable[[], None]:
    """Return what copies the elements of an array to another one of its shape and type; at most one is NumPy's.

    Raises
    ------
    ValueError
        Shape or type differ.
    TypeError
        Both are NumPy's.
    """
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise ValueError(
            f"an array of {source.dtype} {source.shape} cannot be copied to one of {target.dtype} {target.shape}; "
            "shape and type must be the same"
        )
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        raise TypeError("both arrays are NumPy's; at least one must be on the GPU")
    arrays = [array if isinstance(array, np.ndarray) else array.detached() for array in (target, source)]

    def copy() -> None:
        into, out_of = [array if isinstance(array, np.ndarray) else array.peek() for array in arrays]
        np.copyto(into, out_of)

    return copy


class PinnedMemory:
    """The host memory that one runtime has pinned. Thread-safe."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()  # finalizers may run inside it

    @property
    def count(self) -> int:
        """How many ranges are pinned."""
        return len(self._sizes)

    def add(self, address: int, byte_size: int) -> None:
        """Pin a range; CudaError if some of it is pinned."""
        if byte_size <= 0:
            raise failure("pin", "cudaErrorInvalidValue")
        with self._lock:
            if any(begin < address + byte_size and address < begin + size for begin, size in self._sizes.items()):
                raise failure("pin", "cudaErrorHostMemoryAlreadyRegistered")
            self._sizes[address] = byte_size

    def remove(self, address: int) -> None:
        """Undo :meth:`add`; CudaError if no range begins there."""
        with self._lock:
            if self._sizes.pop(address, None) is None:
                raise failure("unpin", "cudaErrorHostMemoryNotRegistered")

    def contains(self, array: npt.NDArray[np.generic]) -> bool:
        """Return whether all of an array is pinned, and can be copied in one piece."""
        address = array.ctypes.data
        with self._lock:
            return array.flags.c_contiguous and any(
                begin <= address and address + array.nbytes <= begin + size for begin, size in self._sizes.items()
            )
