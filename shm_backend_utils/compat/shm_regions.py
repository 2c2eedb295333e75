"""One region of shared memory around one tensor, on the host or on a GPU, registered at a server under a name."""

from __future__ import annotations

import base64
import functools
import math
import operator
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..client.paths.triton_shm import unregister_when_free
from ..errors import ClosedError, TensorShapeError
from ..gpu.arrays.copies import copy
from ..gpu.arrays.device_array import DeviceArray, StridedArray
from ..gpu.memory.access import CudaAccess
from ..gpu.memory.allocations import CudaAllocation
from ..gpu.runtime import PER_THREAD_STREAM
from ..memory.segment import SystemSegment
from ..tensors.strings import Strings
from ..testing.leak_probe import UTIL_PREFIX
from .attach import CudaRegion

__all__ = ["CudaShmHandle", "ShmHandle", "SystemShmHandle"]

_BYTE: Final = np.dtype(np.uint8)


class ShmHandle(ABC):
    """A region of ``byte_size`` bytes that this process has made, owns, and may have registered under its ``name``."""

    _kind: ClassVar[str]  # in the names of tritonclient's methods
    _described: tuple[Any, ...]  # the arguments of those methods after the name

    def __init__(self, name: str, byte_size: int) -> None:
        self.name = name
        self.byte_size = byte_size
        self._may_be_registered = False

    @abstractmethod
    def write(self, data: Any) -> None:
        """Write ``data`` at the beginning; the write is complete when this returns.

        A region on the host takes an array of uint8. A region on a GPU also takes an array on a GPU.
        """

    def read(self, dtype: npt.DTypeLike, shape: int | Sequence[int]) -> npt.NDArray[Any]:
        """Return a tensor at the beginning as a new array: later writes do not change it.

        Dtypes ``object``, ``S`` and ``U`` mean strings, which come as an array of ``bytes`` objects. It raises
        TensorError if the bytes are not such a tensor, and ClosedError if the region was destroyed.
        """
        row = dtypes.from_numpy(dtype, self.name)
        wanted = tuple(operator.index(size) for size in (shape if isinstance(shape, Sequence) else [shape]))
        if any(size < 0 for size in wanted):
            raise TensorShapeError(
                self.name, f"region {self.name!r} is read as shape {list(wanted)}; expected sizes of 0 or more"
            )
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
        """Register the region. A name that is registered already, for example by an aborted run, is taken over."""
        self._unregister(client)
        self._may_be_registered = True  # first: the server may register the region even if no answer comes
        getattr(client, f"register_{self._kind}_shared_memory")(self.name, *self._described)

    def unregister(self, client: Any) -> None:
        """Undo :meth:`register`, if it was called. The server need not know the region any more; twice is fine.

        Call it again if the server does not answer, or has a request in the region for some seconds.
        """
        if self._may_be_registered:
            self._unregister(client)
            self._may_be_registered = False

    def destroy_unless_needed(self) -> None:
        """Free the memory, unless that could have undefined effects in the server."""
        self.destroy()

    @abstractmethod
    def destroy(self) -> None:
        """Free the memory. The server must not have it registered, or at least not use it. Twice is fine."""

    @abstractmethod
    def _read(self, byte_size: int) -> npt.NDArray[np.uint8]:
        """Return a copy of the first bytes."""

    def _unregister(self, client: Any) -> None:
        unregister_when_free(functools.partial(getattr(client, f"unregister_{self._kind}_shared_memory"), self.name))

    def _closed(self) -> ClosedError:
        return ClosedError(f"region {self.name!r}")


class SystemShmHandle(ShmHandle):
    """A region of at least 1 byte in ``/dev/shm``, under a unique ``key`` that begins with a slash."""

    _kind = "system"

    def __init__(self, name: str, byte_size: int) -> None:
        super().__init__(name, byte_size)
        key = f"{UTIL_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._segment: SystemSegment | None = SystemSegment.create(key, byte_size)
        self.key = f"/{key}"
        self._described = self.key, byte_size

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """Write ``data`` at the beginning, as the base class says."""
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


class CudaShmHandle(ShmHandle):
    """A region of at least 1 byte on a GPU. The server maps it by CUDA IPC, and must number the GPU in the same way."""

    _kind = "cuda"

    def __init__(self, name: str, byte_size: int, device_id: int, cuda: CudaAccess) -> None:
        super().__init__(name, byte_size)
        self.device_id = device_id
        self._cuda = cuda
        self._runtime = cuda.runtime
        self._allocation: CudaAllocation | None = CudaAllocation(self._runtime, byte_size, device_id)
        raw_handle = base64.b64encode(self._allocation.handle)
        self._described = raw_handle.decode(), device_id, byte_size
        self.region = CudaRegion(raw_handle, device_id, byte_size)
        """The region's description for :func:`.attach.attach`."""

    def destroy_unless_needed(self) -> None:
        """Free the memory, unless the server may have it mapped: then CUDA leaves the effect undefined."""
        if not self._may_be_registered:
            self.destroy()

    def write(self, data: npt.NDArray[np.uint8] | DeviceArray | StridedArray) -> None:
        """Write ``data`` at the beginning, after all work on the GPUs, as you cannot name a stream here."""
        target = self._array(data.dtype, data.shape)
        devices = {self.device_id} if isinstance(data, np.ndarray) else {self.device_id, data.device}
        for device in devices:
            self._runtime.synchronize_device(device)
        copy(self._runtime, target, data, PER_THREAD_STREAM)
        self._runtime.synchronize_stream(PER_THREAD_STREAM, self.device_id)

    def destroy(self) -> None:
        """Free the memory. Twice is fine."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None
        self._cuda.collect()  # CUDA waits for the GPU

    def _read(self, byte_size: int) -> npt.NDArray[np.uint8]:
        return self._array(_BYTE, (byte_size,)).to_host()

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """Return an array over the beginning, for this class only, as the memory is freed with the region."""
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
