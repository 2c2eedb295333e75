"""Arrays on the fake GPU, with as much of CuPy's arrays as this package and its tests use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ...memory.cuda.runtime import device_guard
from ...tensors import dlpack
from .memories import failure

if TYPE_CHECKING:
    from .memory import FakeMemory
    from .runtime import FakeCuda

__all__ = ["FakeCapsule", "FakeDeviceArray", "c_strides", "kernel"]


@dataclass(frozen=True, eq=False, repr=False)
class FakeDeviceArray:
    """An array on the fake GPU. What is done to it is put on the thread's current stream, as CuPy does it.

    Attributes
    ----------
    runtime : FakeCuda
    memory : FakeMemory or None
        What it lies in; None if it has no bytes.
    address : int
    shape, strides : tuple of int
        Strides are in bytes.
    dtype : numpy.dtype
    device : int
    owner : object
        What the array keeps alive, beside memory of its own.
    """

    runtime: FakeCuda
    memory: FakeMemory | None
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    device: int
    owner: object = None

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether it is C-contiguous."""
        expected = c_strides(self.shape, self.dtype.itemsize)
        steps = zip(self.shape, self.strides, expected, strict=True)
        return 0 in self.shape or all(length == 1 or stride == step for length, stride, step in steps)

    def get(self) -> npt.NDArray[Any]:
        """Return a copy on the host, after all that is on the current stream of the array's device.

        What is on other streams is not waited for.
        """
        with device_guard(self.runtime, self.device):
            self.runtime.synchronize(self.runtime.current_stream().ptr)
        return np.array(self.peek(), order="C")

    def peek(self) -> npt.NDArray[Any]:
        """Return the memory as it is now, whatever is on streams, as a writable view. It must not be kept."""
        if self.memory is None:
            return np.empty(self.shape, self.dtype)
        return self.memory.view(self.address, self.shape, self.dtype, self.strides)

    def detached(self) -> FakeDeviceArray:
        """Return the array as a kernel knows it: what it borrows, it does not keep alive."""
        return replace(self, owner=None)

    def inside(self, memory: FakeMemory) -> FakeDeviceArray:
        """Return the array, which is C-contiguous, as one in this memory; CudaError if some of it would lie outside."""
        if memory.device != self.device:
            raise failure("array", "cudaErrorInvalidDevice")
        if not (memory.contains(self.address) and memory.contains(self.address + self.nbytes - 1)):
            raise failure("array", "cudaErrorInvalidValue")
        return replace(self, memory=memory)

    def fill(self, value: complex) -> None:
        """Set all elements."""
        kernel(lambda memory: memory.fill(value), self)

    def transpose(self, *axes: int) -> FakeDeviceArray:
        """Return a view with its dimensions in another order; the reverse one if none is given."""
        return self._view(self.peek().transpose(*axes))

    def __getitem__(self, key: Any) -> FakeDeviceArray:
        """Return a view. Integers, slices, ``None`` and ``...`` are understood."""
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            if not (part is None or part is ... or isinstance(part, (int, slice))):
                raise TypeError(f"an array of the fake GPU takes integers, slices, None and ... as index, not {part!r}")
        memory = self.peek()
        return self._view(memory[parts if ... in parts else (*parts, ...)])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set elements to a number, an array of the host as it is now, or an array of the fake GPU."""
        if isinstance(value, FakeDeviceArray):
            kernel(_assign, self[key], value)
        else:
            values = np.array(value)
            kernel(lambda memory: _assign(memory, values), self[key])

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Raise, as CuPy does: a copy to the host is asked for by name."""
        raise TypeError("an array on a GPU does not become one of NumPy by itself; call .get() for a copy")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None if self.is_contiguous else self.strides,
            "stream": self.runtime.current_stream().ptr,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        return dlpack.CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> FakeCapsule:
        """Return what stands for a capsule; ``stream`` is the consumer's, by the array API standard."""
        return self.runtime.capsule(self, stream, max_version)

    def __repr__(self) -> str:
        return f"<FakeDeviceArray {self.dtype} {list(self.shape)} GPU {self.device} at {self.address:#x}>"

    def _view(self, view: npt.NDArray[Any]) -> FakeDeviceArray:
        return replace(self, address=view.ctypes.data, shape=view.shape, strides=view.strides)


class FakeCapsule:
    """What stands for a DLPack capsule: it keeps its array, and can be taken over once.

    Attributes
    ----------
    max_version : tuple of int or None
        What the consumer asked for.
    """

    def __init__(self, array: FakeDeviceArray, max_version: tuple[int, int] | None) -> None:
        self.max_version = max_version
        self._array: FakeDeviceArray | None = array

    def take(self) -> FakeDeviceArray:
        """Take the array over; raises ValueError the second time."""
        array, self._array = self._array, None
        if array is None:
            raise ValueError("this DLPack capsule was taken over before; ask its producer for a new one")
        return array


def kernel(function: Callable[..., object], *arrays: FakeDeviceArray) -> None:
    """Put a function on the thread's current stream, which works on arrays.

    Parameters
    ----------
    function : callable
        Called, when somebody waits for the stream, with a writable NumPy view of each array. It must keep none. As a
        kernel's access would, taking the views raises CudaError if the memory is gone by then: as on a GPU, only
        memory that an array has of its own is kept for what is on a stream.
    *arrays : FakeDeviceArray
        At least one, all of one runtime.
    """
    runtime = arrays[0].runtime
    places = [array.detached() for array in arrays]
    runtime.launch(runtime.current_stream(), lambda: function(*[place.peek() for place in places]))


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _assign(target: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    target[...] = values
