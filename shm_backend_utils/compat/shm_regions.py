"""One region of shared memory around one tensor, on the host or on a GPU, registered at a server under a name."""

from __future__ import annotations

import base64
import math
import operator
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..client.unregistering import unregister_when_free
from ..errors import ClosedError, TensorShapeError
from ..gpu.arrays.copies import copy
from ..gpu.arrays.device_array import DeviceArray, StridedArray
from ..gpu.memory.access import CudaAccess
from ..gpu.memory.allocations import CudaAllocation
from ..memory.segment import SystemSegment
from ..tensors.strings import Strings
from ..testing.leak_probe import UTIL_PREFIX
from .attach import CudaRegion

__all__ = ["CudaShmHandle", "ShmHandle", "SystemShmHandle"]

_BYTE: Final = np.dtype(np.uint8)


class ShmHandle(ABC):
    """A region that this process has made, owns, and may have registered at a server.

    Attributes
    ----------
    name : str
        Under which it is registered.
    byte_size : int
        Of the whole region.
    """

    def __init__(self, name: str, byte_size: int) -> None:
        self.name = name
        self.byte_size = byte_size
        self._may_be_registered = False

    @abstractmethod
    def write(self, data: Any) -> None:
        """Fill the beginning; the memory is complete when this returns.

        Parameters
        ----------
        data : numpy.ndarray of uint8, DeviceArray or StridedArray
            At most as many bytes as the region has. A region on the host takes an array alone.
        """

    def read(self, dtype: npt.DTypeLike, shape: int | Sequence[int]) -> npt.NDArray[Any]:
        """Return the beginning as a new array: later writes do not change it.

        Parameters
        ----------
        dtype : numpy.dtype, or an argument of one
            ``object`` and the kinds ``S`` and ``U`` mean strings, which come as an array of ``bytes`` objects.
        shape : int or sequence of int
            Of the tensor.

        Raises
        ------
        TensorShapeError
            The region is smaller than such a tensor, or the shape is none.
        TensorError
            The bytes are no tensor of strings of this shape.
        TensorTypeError
            Triton has no such data type.
        ClosedError
            The region was destroyed.
        """
        row = dtypes.from_numpy(dtype, self.name)
        wanted = _checked_shape(self.name, shape)
        if row is dtypes.BYTES:
            return Strings.encoded_as(self.name, self._read(self.byte_size), wanted).numpy()
        needed = math.prod(wanted) * row.itemsize
        if needed > self.byte_size:
            raise TensorShapeError(
                self.name,
                f"region {self.name!r} has {self.byte_size} bytes, but {row.name} of shape {list(wanted)} takes "
                f"{needed}; read less, or make the region larger",
            )
        return self._read(needed).view(row.numpy).reshape(wanted)

    def register(self, client: Any) -> None:
        """Register the region. A name that is registered already, as an aborted run leaves it, is taken over.

        Raises
        ------
        tritonclient.utils.InferenceServerException
            The server refuses.
        """
        unregister_when_free(lambda: self._unregister_at(client))
        self._may_be_registered = True  # even if no answer comes
        self._register_at(client)

    def unregister(self, client: Any) -> None:
        """Undo :meth:`register`, if it was called. The server need not know the region any more; twice is fine.

        Raises
        ------
        tritonclient.utils.InferenceServerException
            The server does not answer, or has a request in the region for longer than some seconds. It can be tried
            again.
        """
        if self._may_be_registered:
            unregister_when_free(lambda: self._unregister_at(client))
            self._may_be_registered = False

    def destroy_unless_needed(self) -> None:
        """Give the memory back, unless the server may do undefined things if it goes now."""
        self.destroy()

    @abstractmethod
    def destroy(self) -> None:
        """Give the memory back. The server must not have it registered, or at least not use it. Twice is fine."""

    @abstractmethod
    def _read(self, byte_size: int) -> npt.NDArray[np.uint8]:
        """Return a copy of the first bytes."""

    @abstractmethod
    def _register_at(self, client: Any) -> None: ...

    @abstractmethod
    def _unregister_at(self, client: Any) -> None: ...

    def _closed(self) -> ClosedError:
        return ClosedError(f"region {self.name!r}")


class SystemShmHandle(ShmHandle):
    """A region in ``/dev/shm``, under a unique key.

    Parameters
    ----------
    name : str
        Under which it will be registered.
    byte_size : int
        At least 1.

    Attributes
    ----------
    key : str
        With a leading slash, as Triton wants it.

    Raises
    ------
    MachineError
        ``/dev/shm`` has not that much space left, or this process no file descriptors.
    """

    def __init__(self, name: str, byte_size: int) -> None:
        super().__init__(name, byte_size)
        key = f"{UTIL_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._segment: SystemSegment | None = SystemSegment.create(key, byte_size)
        self.key = f"/{key}"

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """Fill the beginning, as the base class says."""
        self._memory()[: data.size] = data

    def destroy(self) -> None:
        """Remove the object from ``/dev/shm`` and unmap it. Twice is fine."""
        if self._segment is not None:
            self._segment.unlink()
            self._segment.close()
            self._segment = None

    def _read(self, byte_size: int) -> npt.NDArray[np.uint8]:
        return np.array(self._memory()[:byte_size])

    def _memory(self) -> npt.NDArray[np.uint8]:
        if self._segment is None:
            raise self._closed()
        return np.frombuffer(self._segment.buffer(), _BYTE)

    def _register_at(self, client: Any) -> None:
        client.register_system_shared_memory(self.name, self.key, self.byte_size)

    def _unregister_at(self, client: Any) -> None:
        client.unregister_system_shared_memory(self.name)


class CudaShmHandle(ShmHandle):
    """A region on a GPU, which the server maps by CUDA IPC.

    Parameters
    ----------
    name : str
        Under which it will be registered.
    byte_size : int
        At least 1.
    device_id : int
        The GPU, for this process and for the server.
    cuda : CudaAccess
        CUDA in this process.

    Raises
    ------
    MachineError
        cuda-bindings or a GPU is missing, or the GPU has not that much memory left.
    """

    def __init__(self, name: str, byte_size: int, device_id: int, cuda: CudaAccess) -> None:
        super().__init__(name, byte_size)
        self.device_id = device_id
        self._cuda = cuda
        self._runtime = cuda.runtime
        self._allocation: CudaAllocation | None = CudaAllocation(self._runtime, byte_size, device_id)
        self._raw_handle = base64.b64encode(self._allocation.handle).decode()

    @property
    def region(self) -> CudaRegion:
        """Its description for :func:`.attach.attach`."""
        return CudaRegion(self._raw_handle.encode(), self.device_id, self.byte_size)

    def destroy_unless_needed(self) -> None:
        """Free the memory unless the server may have it mapped: CUDA leaves the effect undefined."""
        if not self._may_be_registered:
            self.destroy()

    def write(self, data: npt.NDArray[np.uint8] | DeviceArray | StridedArray) -> None:
        """Fill the beginning, as the base class says, after all work on the GPUs: streams cannot be named here."""
        target = self._array(data.dtype, data.shape)
        devices = {self.device_id} if isinstance(data, np.ndarray) else {self.device_id, data.device}
        for device in devices:
            self._runtime.synchronize_device(device)
        stream = self._runtime.create_stream(self.device_id)
        try:
            copy(self._runtime, target, data, stream)
            self._runtime.synchronize_stream(stream, self.device_id)
        finally:
            self._runtime.destroy_stream(stream, self.device_id)

    def destroy(self) -> None:
        """Free the memory. Twice is fine."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None
            self._cuda.collect()
            self._runtime.synchronize_device(self.device_id)
        self._cuda.collect()  # now the GPU has finished with it

    def _read(self, byte_size: int) -> npt.NDArray[np.uint8]:
        return self._array(_BYTE, (byte_size,)).to_host()

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """Return an array over the beginning, for this class alone: the memory goes with the region."""
        allocation = self._allocation
        if allocation is None:
            raise self._closed()
        array = DeviceArray(self._runtime, allocation.address, shape, dtype, self.device_id, allocation)
        if array.nbytes > self.byte_size:
            raise TensorShapeError(
                self.name,
                f"region {self.name!r} has {self.byte_size} bytes, but {array.nbytes} are to be written; write less, "
                "or make the region larger",
            )
        return array

    def _register_at(self, client: Any) -> None:
        client.register_cuda_shared_memory(self.name, self._raw_handle, self.device_id, self.byte_size)

    def _unregister_at(self, client: Any) -> None:
        client.unregister_cuda_shared_memory(self.name)


def _checked_shape(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, Sequence) else [shape]
    wanted = tuple(operator.index(size) for size in sizes)
    if any(size < 0 for size in wanted):
        raise TensorShapeError(name, f"region {name!r} is read as shape {list(wanted)}; expected sizes of 0 or more")
    return wanted
