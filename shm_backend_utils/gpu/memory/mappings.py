"""GPU memory that other processes have allocated, mapped by CUDA IPC.

The exporter owns the memory. An importer maps it at an address of its own, and must close that mapping before the
exporter frees the memory. Otherwise its accesses are undefined (NVIDIA's documentation of ``cuIpcOpenMemHandle``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Final

from ...errors import ClosedError, RegionRefusedError, translate
from ...memory.locks import SharedLease
from ..errors import CudaError
from ..runtime import HANDLE_LENGTH, CudaRuntime

__all__ = ["CudaMapping", "CudaMappings", "device_with"]

_NO_FILE_SYSTEM: Final = -1


class _Opened:
    """One allocation that ``cuIpcOpenMemHandle`` has opened, and the number of its uses."""

    def __init__(self, runtime: CudaRuntime, handle: bytes, device: int) -> None:
        self.handle = handle
        self.device = device
        self.address = runtime.open(handle, device)
        self.uses = 0
        self.byte_size = 0


class CudaMapping:
    """Another process' allocation, mapped. It is unmapped after it is closed *and* nothing keeps it any more."""

    key = ""
    is_unlinked = False

    def __init__(self, runtime: CudaRuntime, opened: _Opened, use: _Use) -> None:
        self.runtime = runtime
        self.address = opened.address
        self.byte_size = opened.byte_size
        self.device = opened.device
        self.handle = opened.handle
        # Equal for mappings of one allocation only; never equal to a file's identity.
        self.identity = (_NO_FILE_SYSTEM, int.from_bytes(opened.handle, "big"))
        self._use: _Use | None = use

    @property
    def is_closed(self) -> bool:
        """Whether the mapping was closed."""
        return self._use is None

    @property
    def keeper(self) -> object:
        """The object that arrays hold to keep the memory; ClosedError if the mapping was closed."""
        if self._use is None:
            raise ClosedError("this region")
        return self._use

    def check(self, byte_size: int, field: str) -> None:
        """Raise RegionRefusedError unless the memory has at least ``byte_size`` bytes."""
        if byte_size > self.byte_size:
            raise RegionRefusedError(field, f"it claims {byte_size} bytes of an allocation of {self.byte_size}")

    def close(self) -> None:
        """Unmap the memory as soon as nothing keeps it and the device is done. Twice is fine."""
        self._use = None

    def close_unused(self) -> None:
        """Unmap the memory now. Only for memory that was never used and that no array keeps. Twice is fine."""
        use, self._use = self._use, None
        if use is not None:
            use.end()

    def close_idle(self) -> None:
        """Close the mapping after waiting for the device. If no array keeps it, ``retired.collect_idle`` unmaps it."""
        use, self._use = self._use, None
        if use is not None:
            use.is_idle = True
            watched = weakref.ref(use)
            del use
            kept = watched()
            if kept is not None:
                kept.is_idle = False  # an array keeps the memory, so a GPU may use it again


class _Use:
    """One use of a mapped allocation; its end gives the lease back, and the last use's end unmaps the allocation."""

    def __init__(self, mappings: CudaMappings, opened: _Opened, lease: SharedLease | None) -> None:
        self._mappings = mappings
        self._opened: _Opened | None = opened
        self._lease = lease
        self._process = os.getpid()
        self.is_idle = False

    def end(self) -> None:
        """End the use now, when no GPU uses the memory; if CUDA cannot unmap the memory, never give the lease back."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(CudaError):
                _end(self._mappings, opened, self._lease)

    def __del__(self) -> None:
        if self._process != os.getpid():  # a forked child owns only its copy of the lease's descriptor
            if self._lease is not None:
                self._lease.give_back()
            return
        retired, opened = self._mappings.runtime.retired, self._opened
        if opened is not None:
            end = functools.partial(_end, self._mappings, opened, self._lease)
            if self.is_idle:
                retired.add_idle(end)
            else:
                retired.add(opened.device, end)


def _end(mappings: CudaMappings, opened: _Opened, lease: SharedLease | None) -> None:
    mappings.end_use(opened)
    # Last, and only if the step above succeeded: afterwards the owner may free the memory.
    if lease is not None:
        lease.give_back()


class CudaMappings:
    """This process' mappings: one for each allocation, for any number of uses. Thread-safe."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._opened: dict[tuple[bytes, int], _Opened] = {}

    def map(
        self,
        handle: bytes,
        byte_size: int,
        device: int,
        field: str,
        lease: SharedLease | None = None,
    ) -> CudaMapping:
        """Map another process' allocation. The end of this use gives the lease back."""
        try:
            _check_length(handle, field)
            with self._lock, _refused(field):
                opened = self._used(handle, device, field)
            use = _Use(self, opened, lease)
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise
        try:
            mapping = CudaMapping(self.runtime, opened, use)
            mapping.check(byte_size, field)
        except BaseException:
            use.end()  # before the error is reported, because the owner may then free the memory
            raise
        return mapping

    def end_use(self, opened: _Opened) -> None:
        """Count one use less, and unmap the allocation after the last use; CudaError if that fails."""
        with self._lock:
            opened.uses -= 1
            if not opened.uses:
                del self._opened[opened.handle, opened.device]
                self.runtime.close(opened.address, opened.device)

    def _used(self, handle: bytes, device: int, field: str) -> _Opened:
        opened = self._opened.get((handle, device))
        if opened is None:
            opened = _Opened(self.runtime, handle, device)
            try:
                begin, byte_size = self.runtime.extent(opened.address, device)
                found = self.runtime.pointer(opened.address).device
                if found != device:  # with peer access, CUDA opens a handle of another GPU, too
                    raise RegionRefusedError(field, f"it is on GPU {found}, but claims to be on GPU {device}")
            except BaseException:
                self.runtime.close(opened.address, device)
                raise
            opened.byte_size = begin + byte_size - opened.address
            self._opened[handle, device] = opened
        opened.uses += 1
        return opened


def _refused(field: str) -> translate[CudaError]:
    return translate(CudaError, lambda error: RegionRefusedError(field, str(error)))


def _check_length(handle: bytes, field: str) -> None:
    if len(handle) != HANDLE_LENGTH:
        raise RegionRefusedError(field, f"its handle has {len(handle)} bytes; expected {HANDLE_LENGTH}")


def device_with(runtime: CudaRuntime, uuid: str, field: str) -> int:
    """Return this process' number of the GPU with a UUID; RegionRefusedError for the field if it sees no such GPU."""
    count = runtime.device_count()
    for device in range(count):
        if runtime.device_uuid(device) == uuid:
            return device
    raise RegionRefusedError(
        field,
        f"it is on a GPU, or an instance of one (MIG), that this model does not see (it sees {count}); see "
        "CUDA_VISIBLE_DEVICES, --gpus and the model's instance_group",
    )
