"""The part of CUDA's virtual memory management that shares memory by descriptors of files: calls of the driver.

Memory is created or imported under a handle, then mapped at reserved addresses. It lives as long as a process maps it,
or has its descriptor. CUDA maps it as a whole only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..memory.descriptors import Descriptor
from .contexts import Contexts
from .errors import CudaError

__all__ = ["BLOCK_BYTES", "VirtualMemory"]

BLOCK_BYTES: Final = 2 * 2**20
"""CUDA allocates in blocks of this size, and an IPC handle opens whole blocks. So shared memory fills whole blocks."""

_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"

T = TypeVar("T")


class VirtualMemory(Contexts):
    """The driver's calls for virtual memory; :class:`.CudaRuntime` has the others."""

    def shares_by_descriptor(self, device: int) -> bool:
        """Return whether a device has virtual memory that descriptors share (``cuDeviceGetAttribute``)."""
        return self._has(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") and self._has(
            device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
        )

    def create_shareable(self, byte_size: int, device: int) -> tuple[int, Descriptor] | None:
        """Create memory, map it, and export it; return its address and its descriptor (``cuMemCreate``).

        The size is one of whole blocks. The result is None if CUDA refuses such memory, but for a lack of memory.
        """
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = kind = self._descriptors
        doing = f"allocating {byte_size} bytes on GPU {device}"
        with self.on(device):
            try:
                handle = self._ask(doing, "cuMemCreate", byte_size, properties, 0)

                def export() -> Descriptor:
                    exported = self._ask("exporting GPU memory", "cuMemExportToShareableHandle", handle, kind, 0)
                    return Descriptor(int, exported)

                return self._mapped(handle, byte_size, device, export)
            except CudaError as error:
                if error.name == _OUT_OF_MEMORY:
                    raise
                return None

    def import_shareable(self, descriptor: int, byte_size: int, device: int) -> int:
        """Map memory of a descriptor and return its address (``cuMemImportFromShareableHandle``).

        CudaError ``CUDA_ERROR_NOT_SUPPORTED`` if the memory has another size.
        """
        doing = "importing GPU memory by its descriptor"
        with self.on(device):
            handle = self._ask(doing, "cuMemImportFromShareableHandle", descriptor, self._descriptors)
            address, _ = self._mapped(handle, byte_size, device, lambda: None)
        return address

    def unmap(self, address: int, byte_size: int, device: int) -> None:
        """Unmap memory of the two methods above, without waiting for its device (``cuMemUnmap``)."""
        with self.on(device):
            self._ask("unmapping GPU memory", "cuMemUnmap", address, byte_size)
            self._ask("freeing addresses of GPU memory", "cuMemAddressFree", address, byte_size)

    def _mapped(self, handle: Any, byte_size: int, device: int, export: Callable[[], T]) -> tuple[int, T]:
        """Map memory for reading and writing by its device, export it, and let the mapping alone keep it."""
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        doing = f"mapping {byte_size} bytes of GPU {device}"
        with contextlib.ExitStack() as end:
            end.callback(self._ask, "releasing GPU memory", "cuMemRelease", handle)
            address = self._ask(doing, "cuMemAddressReserve", byte_size, 0, 0, 0)
            with contextlib.ExitStack() as failed:
                failed.callback(self._ask, doing, "cuMemAddressFree", address, byte_size)
                self._ask(doing, "cuMemMap", address, byte_size, 0, handle, 0)
                failed.callback(self._ask, doing, "cuMemUnmap", address, byte_size)
                self._ask(doing, "cuMemSetAccess", address, byte_size, [access], 1)
                exported = export()
                failed.pop_all()
            return int(address), exported

    @property
    def _descriptors(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _has(self, device: int, attribute: str) -> bool:
        asked = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        doing = f"asking for the abilities of GPU {device}"
        return bool(self._ask(doing, "cuDeviceGetAttribute", asked, self._ask(doing, "cuDeviceGet", device)))
