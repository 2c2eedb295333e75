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
from typing import Final, Protocol

from ...errors import ClosedError, RegionRefusedError, translate
from ...memory.locks import SharedLease
from ..errors import CudaError
from ..runtime import HANDLE_LENGTH, CudaRuntime

__all__ = ["CudaMapping", "CudaMappings", "Use", "device_with"]

_NO_FILE_SYSTEM: Final = -1


class _Opened:
    """One allocation that ``cuIpcOpenMemHandle`` opens for its first use, and the number of its uses."""

    def __init__(self, handle: bytes, device: int) -> None:
        self.handle = handle
        self.device = device
        self.uses = 0
        self.lock = threading.Lock()  # held while CUDA opens or closes the allocation, which may take long
        self.address = 0  # 0 while it is not open
        self.byte_size = 0

    def open(self, runtime: CudaRuntime, field: str) -> None:
        address = runtime.open(self.handle, self.device)
        try:
            begin, byte_size = runtime.extent(address, self.device)
            found = runtime.pointer(address).device
            if found != self.device:  # with peer access, CUDA opens a handle of another GPU, too
                raise RegionRefusedError(field, f"it is on GPU {found}, but claims to be on GPU {self.device}")
        except BaseException:
            runtime.close(address, self.device)
            raise
        self.byte_size = begin + byte_size - address
        self.address = address


class Use(Protocol):
    """One use of a mapped allocation. Arrays keep it, and after the last use, the allocation is unmapped."""

    is_idle: bool  # whether no GPU uses the memory any more

    def end(self) -> None:
        """End the use now."""


class CudaMapping:
    """Another process' allocation, mapped. It is unmapped after it is closed *and* nothing keeps it any more."""

    key = ""
    is_unlinked = False

    def __init__(
        self,
        runtime: CudaRuntime,
        address: int,
        byte_size: int,
        device: int,
        identity: tuple[int, int],
        use: Use,
        handle: bytes | None = None,
    ) -> None:
        self.runtime = runtime
        self.address = address
        self.byte_size = byte_size
        self.device = device
        self.identity = identity  # equal for mappings of one allocation only; never equal to a file's identity
        self.handle = handle  # by CUDA IPC; None if the memory has none
        self._use: Use | None = use

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
        """Unmap the memory as soon as nothing keeps it. Twice is fine."""
        self._use = None

    def close_unused(self) -> None:
        """Unmap the memory now. Only for memory that was never used and that no array keeps. Twice is fine."""
        use, self._use = self._use, None
        if use is not None:
            use.end()

    def close_idle(self) -> None:
        """Close the mapping after waiting for the device. If no array keeps it, ``retired.collect_now`` unmaps it."""
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
                _end(self._mappings, opened, self._lease, is_idle=True)

    def __del__(self) -> None:
        if self._process != os.getpid():  # a forked child owns only its copy of the lease's descriptor
            if self._lease is not None:
                self._lease.give_back()
            return
        retired, opened = self._mappings.runtime.retired, self._opened
        if opened is not None:
            retired.add(functools.partial(_end, self._mappings, opened, self._lease, is_idle=self.is_idle))


def _end(mappings: CudaMappings, opened: _Opened, lease: SharedLease | None, *, is_idle: bool) -> None:
    is_unmapped = mappings.end_use(opened)
    if not is_unmapped and not is_idle:  # nothing was unmapped, so CUDA has not waited for the device
        mappings.runtime.wait_beside_captures(opened.device)
    # Last, and only if the steps above succeeded: afterwards the owner may free the memory.
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
            with _refused(field):
                opened = self._begin_use(handle, device, field)
            use = _Use(self, opened, lease)
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise
        try:
            identity = _NO_FILE_SYSTEM, int.from_bytes(handle, "big")
            mapping = CudaMapping(self.runtime, opened.address, opened.byte_size, device, identity, use, handle)
            mapping.check(byte_size, field)
        except BaseException:
            use.end()  # before the error is reported, because the owner may then free the memory
            raise
        return mapping

    def end_use(self, opened: _Opened) -> bool:
        """Count one use less, and unmap the allocation after the last one; CudaError if that fails.

        Return whether this has unmapped it.
        """
        with self._lock:
            opened.uses -= 1
            if opened.uses:
                return False
        with opened.lock:
            try:
                address = 0 if opened.uses else opened.address  # a use that began meanwhile keeps it open
                if address:
                    opened.address = 0
                    self.runtime.close(address, opened.device)
            finally:
                with self._lock:
                    key = opened.handle, opened.device
                    if not opened.uses and self._opened.get(key) is opened:  # two threads may end the last use
                        del self._opened[key]
        return bool(address)

    def _begin_use(self, handle: bytes, device: int, field: str) -> _Opened:
        with self._lock:
            opened = self._opened.setdefault((handle, device), _Opened(handle, device))
            opened.uses += 1  # before it is open, so that all users of a handle share one lock
        try:
            with opened.lock:
                if not opened.address:
                    opened.open(self.runtime, field)
        except BaseException:
            self.end_use(opened)
            raise
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
