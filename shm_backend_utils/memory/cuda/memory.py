"""CUDA IPC: device memory that one process allocates and others map.

The memory is the exporter's. CUDA gives an importer an address of its own; it must be closed before the exporter frees
the memory, or what the importer does is undefined (CUDA's documentation of ``cudaIpcOpenMemHandle``).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...errors import ClosedError, RegionRefusedError
from ..locks import SharedLease
from .runtime import HANDLE_LENGTH, CudaError, CudaRuntime, device_guard

__all__ = ["CudaAccess", "CudaAllocation", "CudaMapping", "CudaMappings", "device_of"]


_NO_FILE_SYSTEM: Final = -1


class DeviceSpan:
    """Device memory from an address on. Arrays over it keep it alive, also when it was closed.

    Parameters
    ----------
    runtime : CudaRuntime
    address, byte_size, device : int
        Where it is, and how much.
    keeper : object
        Frees or unmaps the memory, when nothing refers to it any more.
    """

    _what = "this device memory"

    def __init__(self, runtime: CudaRuntime, address: int, byte_size: int, device: int, keeper: object) -> None:
        self.runtime = runtime
        self.address = address
        self.byte_size = byte_size
        self.device = device
        self._keeper: object | None = keeper

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._keeper is None

    def array_at(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], byte_size: int, owner: object = None
    ) -> Any | None:
        """Return a C-contiguous array, of CuPy, at an offset; None if it would need more than ``byte_size`` bytes.

        Parameters
        ----------
        offset, byte_size : int
            Inside this memory.
        dtype : numpy.dtype
            Of the elements.
        shape : tuple of int
            Of the array.
        owner : object
            What the array keeps alive, beside this memory.

        Raises
        ------
        ClosedError
            The memory was closed.
        """
        if self._keeper is None:
            raise ClosedError(self._what)
        if math.prod(shape) * dtype.itemsize > byte_size:
            return None
        with device_guard(self.runtime, self.device):
            return self.runtime.array(self.address + offset, shape, dtype, self.device, (self._keeper, owner))

    def close(self) -> None:
        """Let go of the memory, as soon as no array over it is left here. Twice is fine."""
        self._keeper = None


class CudaAllocation(DeviceSpan):
    """Device memory of this process, with the handle by which others map it.

    It is freed when it was closed *and* no array over it is left here; others must have unmapped it.

    Attributes
    ----------
    handle : bytes
        64 bytes, CUDA's ``cudaIpcMemHandle_t``.
    device_uuid : str
    """

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        block = _Block(runtime, byte_size, device)
        super().__init__(runtime, block.address, byte_size, device, block)
        with device_guard(runtime, device):
            self.handle = runtime.export(self.address)
            self.device_uuid = runtime.device_uuid(device)

    free = DeviceSpan.close


class _Block:
    """One ``cudaMalloc``, freed when the last one that refers to it has gone."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._process = 0
        with device_guard(runtime, device):
            self.address = runtime.allocate(byte_size)
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child it is not ours
            with contextlib.suppress(CudaError), device_guard(self._runtime, self._device):
                self._runtime.free(self.address)


class CudaMapping(DeviceSpan):
    """Another process' allocation, mapped. It is unmapped when it was closed *and* no array over it is left.

    Attributes
    ----------
    identity : tuple of int
        What memory it is: equal for mappings of the same allocation, and for nothing else, also no file.
    handle : bytes
    """

    key = ""
    is_unlinked = False
    _what = "this region"

    def __init__(self, opened: _Opened) -> None:
        super().__init__(opened.runtime, opened.address, opened.byte_size, opened.device, opened)
        self.handle = opened.handle
        self.identity = (_NO_FILE_SYSTEM, int.from_bytes(opened.handle, "big"))

    def check(self, byte_size: int, field: str) -> None:
        """Raise RegionRefusedError unless the memory has so many bytes."""
        if byte_size > self.byte_size:
            raise RegionRefusedError(field, f"it claims {byte_size} bytes of an allocation of {self.byte_size}")


class _Opened:
    """One ``cudaIpcOpenMemHandle``; closed when the last one that refers to it has gone."""

    def __init__(self, runtime: CudaRuntime, handle: bytes, device: int, lease: SharedLease | None) -> None:
        self.runtime = runtime
        self.handle = handle
        self.device = device
        self._lease = lease
        self._process = 0
        with device_guard(runtime, device):
            self.address = runtime.open(handle)
            self._process = os.getpid()
            begin, byte_size = runtime.extent(self.address)
        self.byte_size = begin + byte_size - self.address

    def __del__(self) -> None:
        if self._process == os.getpid():
            try:
                with device_guard(self.runtime, self.device):
                    self.runtime.close(self.address)
            except CudaError:
                return  # it is still mapped, so that its owner must not free it: the lease goes with this process
        if self._lease is not None:
            self._lease.give_back()  # last: from now on the owner may free the memory


class CudaMappings:
    """What this process has mapped: every allocation once, however often it is asked for. Thread-safe."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._opened: weakref.WeakValueDictionary[bytes, _Opened] = weakref.WeakValueDictionary()

    def map(
        self, handle: bytes, byte_size: int, device: int, field: str, lease: SharedLease | None = None
    ) -> CudaMapping:
        """Map an allocation of another process.

        Parameters
        ----------
        handle : bytes
            Its IPC handle.
        byte_size : int
            What it is claimed to have; it may have more.
        device : int
            Of this process.
        field : str
            What to call it in messages.
        lease : SharedLease, optional
            Given back when the memory is no longer mapped, or was mapped before.

        Raises
        ------
        RegionRefusedError
            It cannot be mapped here, or is smaller than claimed.
        """
        if len(handle) != HANDLE_LENGTH:
            _give_back(lease)
            raise RegionRefusedError(field, f"its handle has {len(handle)} bytes; expected {HANDLE_LENGTH}")
        with self._lock:
            opened = self._opened.get(handle)
            if opened is not None:
                _give_back(lease)
            else:
                try:
                    opened = self._opened[handle] = _Opened(self.runtime, handle, device, lease)
                except CudaError as error:
                    _give_back(lease)
                    raise RegionRefusedError(field, str(error)) from None
        if opened.byte_size < byte_size:
            raise RegionRefusedError(field, f"it claims {byte_size} bytes of an allocation of {opened.byte_size}")
        return CudaMapping(opened)


def _give_back(lease: SharedLease | None) -> None:
    if lease is not None:
        lease.give_back()


def device_of(runtime: CudaRuntime, uuid: str, field: str) -> int:
    """Return this process' number of the GPU with a UUID; ``field`` is what to call its memory in messages.

    Raises
    ------
    RegionRefusedError
        This process does not see that device.
    """
    count = runtime.device_count()
    for device in range(count):
        if runtime.device_uuid(device) == uuid:
            return device
    raise RegionRefusedError(
        field,
        f"it is on a GPU that this model does not see (it sees {count}); see CUDA_VISIBLE_DEVICES, --gpus and the "
        "model's instance_group",
    )


def _load_cupy() -> CudaRuntime:
    from .cupy_runtime import CupyRuntime  # noqa: PLC0415  # only where a GPU is used

    return CupyRuntime()


class CudaAccess:
    """CUDA in this process, loaded when it is needed first.

    Parameters
    ----------
    load : callable, optional
        Returns the runtime; by default CuPy's. It raises MachineError where there is no GPU.
    """

    def __init__(self, load: Callable[[], CudaRuntime] = _load_cupy) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._mappings: CudaMappings | None = None

    @property
    def mappings(self) -> CudaMappings:
        """What this process has mapped.

        Raises
        ------
        MachineError
            CuPy, the driver or the GPU is missing.
        """
        with self._lock:
            if self._mappings is None:
                self._mappings = CudaMappings(self._load())
            return self._mappings

    @property
    def runtime(self) -> CudaRuntime:
        """The runtime; raises as :attr:`mappings`."""
        return self.mappings.runtime
