"""GPU memory that this process allocates: for itself, and for other processes to map."""

from __future__ import annotations

import functools
import os

from ...errors import ClosedError
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim
from ..runtime import CudaRuntime, whole_blocks

__all__ = ["Allocation", "CudaAllocation", "OwnMemory"]


class OwnMemory:
    """Memory from ``cuMemAlloc``, freed after the last reference is gone; the driver then waits for the device."""

    _process = 0

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._addresses: list[int] = []
        self._process = os.getpid()
        self._addresses.append(runtime.allocate(byte_size, device))

    @property
    def address(self) -> int:
        return self._addresses[0]

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the memory is the parent's
            for address in self._addresses:  # an interrupt may have prevented the allocation
                self._runtime.retired.add(functools.partial(self._runtime.free, address, self._device))


class Allocation:
    """GPU memory of this process for models to map; freed when nothing here keeps it."""

    def __init__(
        self, owned: object, address: int, byte_size: int, device: int, claim: CudaRegionClaim | CudaDescriptorClaim
    ) -> None:
        self.address = address
        self.byte_size = byte_size
        self.device = device
        self.claim = claim  # for a request in a slot that fences the memory
        self._owned: object | None = owned

    @property
    def keeper(self) -> object:
        """The object that arrays hold to keep the memory; ClosedError if the memory was freed."""
        if self._owned is None:
            raise ClosedError("this device memory")
        return self._owned

    def free(self) -> None:
        """Release the memory. Twice is fine."""
        self._owned = None


class CudaAllocation(Allocation):
    """Memory that models map by CUDA IPC."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        owned, byte_size = OwnMemory(runtime, byte_size, device), whole_blocks(byte_size)
        self.handle = runtime.export(owned.address, device)  # 64 bytes, CUDA's CUipcMemHandle
        self.device_uuid = runtime.device_uuid(device)
        claim = CudaRegionClaim(self.handle, byte_size, self.device_uuid, 0, waits=True)
        super().__init__(owned, owned.address, byte_size, device, claim)
