"""Slot records that streams write to and wait for: the records' pages of a region's mapping, registered with CUDA."""

from __future__ import annotations

import functools
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...memory.managed import ManagedRegion
from ...protocol.layout import completed_offset, data_offset, record_offset
from ..errors import CudaError
from ..ordering import do_after_all_work
from ..runtime import CudaRuntime

__all__ = ["PinnedRecords"]

_ALREADY_REGISTERED: Final = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


class PinnedRecords:
    """All slot records of one mapping of a region. Thread-safe.

    They are registered when a stream first needs them, and no longer when the mapping ends and GPUs have finished with
    them. Memory that SHM_PIN_HOST_MEMORY or another library has registered is not registered again.
    """

    _is_registered_here = False

    def __init__(self, runtime: CudaRuntime, region: ManagedRegion) -> None:
        header = region.header
        self._begin = record_offset(0, header.record_byte_size)
        self._record_byte_size = header.record_byte_size
        end = data_offset(header.slot_count, header.record_byte_size)
        self._records = np.frombuffer(region.buffer(), np.uint8)[self._begin : end]  # keeps the memory mapped
        self._runtime = runtime
        self._addresses: dict[int, int | None] = {}  # where each device finds the records; None if it cannot use them
        self._process = os.getpid()

    @classmethod
    def of(cls, runtime: CudaRuntime, region: ManagedRegion) -> PinnedRecords:
        """Return the records of a region's present mapping, the same object for all callers."""
        found: PinnedRecords = region.attached.get(cls) or region.attached.setdefault(cls, cls(runtime, region))
        return found

    def completed(self, slot: int, device: int) -> int | None:
        """Return where streams of a device find a slot's ``completed``; None if they cannot use host memory."""
        if device not in self._addresses:
            self._addresses[device] = self._found(device)
        address = self._addresses[device]
        return None if address is None else address + completed_offset(slot, self._record_byte_size) - self._begin

    def _found(self, device: int) -> int | None:
        address: int = self._records.__array_interface__["data"][0]
        try:
            if not self._runtime.has_memory_operations(device):
                return None
            try:
                self._runtime.pin(address, self._records.nbytes)
                self._is_registered_here = True
            except CudaError as error:
                if error.name != _ALREADY_REGISTERED:  # here too, for another device or by another thread
                    raise
            except BaseException:  # an interrupt, which may have come after the registration
                self._is_registered_here = True
                raise
            return self._runtime.device_address(address, device)
        except CudaError:
            return None

    def __del__(self) -> None:
        if self._is_registered_here and self._process == os.getpid():  # in a forked child, CUDA is the parent's
            unpin = functools.partial(_unpin, self._runtime, self._records)
            do_after_all_work(self._runtime, tuple(self._addresses), unpin)  # streams may still use the records


def _unpin(runtime: CudaRuntime, records: npt.NDArray[Any]) -> None:
    runtime.unpin(records.__array_interface__["data"][0])
