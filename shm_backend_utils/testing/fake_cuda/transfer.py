"""Copies between the host and the fake GPU, and the host memory that is pinned for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .device_array import FakeDeviceArray
from .memories import failure

__all__ = ["PinnedMemory", "Transfer"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy that is still to be done."""

    target: FakeDeviceArray | npt.NDArray[np.generic]
    source: FakeDeviceArray | npt.NDArray[np.generic]

    @classmethod
    def between(
        cls, target: FakeDeviceArray | npt.NDArray[np.generic], source: FakeDeviceArray | npt.NDArray[np.generic]
    ) -> Transfer:
        """Return a copy between two arrays of one shape and type, of which at most one is NumPy's.

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
        return cls(_detached(target), _detached(source))

    @property
    def host(self) -> list[npt.NDArray[np.generic]]:
        """What of it is in the host's memory."""
        return [array for array in (self.target, self.source) if isinstance(array, np.ndarray)]

    @property
    def direction(self) -> str:
        """From where to where, as in ``"host to device"``."""
        return f"{_place(self.source)} to {_place(self.target)}"

    def run(self) -> None:
        """Copy the elements, as they are now."""
        np.copyto(_memory(self.target), _memory(self.source))


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


def _detached(array: FakeDeviceArray | npt.NDArray[np.generic]) -> FakeDeviceArray | npt.NDArray[np.generic]:
    return array if isinstance(array, np.ndarray) else array.detached()


def _memory(array: FakeDeviceArray | npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return array if isinstance(array, np.ndarray) else array.peek()


def _place(array: FakeDeviceArray | npt.NDArray[np.generic]) -> str:
    return "host" if isinstance(array, np.ndarray) else "device"
