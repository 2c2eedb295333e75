"""Memory of GPUs that this process allocates, for others to map."""

from __future__ import annotations

import os

from ...errors import ClosedError
from .runtime import CudaRuntime, whole_blocks

__all__ = ["CudaAllocation"]


class CudaAllocation:
    """Device memory of this process, with the handle by which others map it, and an event for what they do there.

    It is freed when it was let go of *and* nothing keeps it any more here; others must have unmapped it. It takes whole
    blocks, so that nobody who opens it sees anything else.

    Attributes
    ----------
    runtime : CudaRuntime
    address, byte_size, device : int
    handle : bytes
        64 bytes, CUDA's ``CUipcMemHandle``.
    device_uuid : str
    event : int
        Others record it on their streams; this process waits for it.
    event_handle : bytes
        64 bytes, CUDA's ``CUipcEventHandle``.
    """

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        owned = _Owned(runtime, byte_size, device)
        self.runtime = runtime
        self.device = device
        self.byte_size = whole_blocks(byte_size)
        self.address = owned.address
        self.event = owned.event
        self._owned: _Owned | None = owned
        self.handle = runtime.export(owned.address)
        with runtime.on(device):
            self.event_handle = runtime.export_event(owned.event)
        self.device_uuid = runtime.device_uuid(device)

    @property
    def keeper(self) -> object:
        """What keeps the memory, for arrays over it; ClosedError if it was freed."""
        if self._owned is None:
            raise ClosedError("this device memory")
        return self._owned

    def free(self) -> None:
        """Let go of the memory. Twice is fine."""
        self._owned = None


class _Owned:
    """One ``cuMemAlloc`` and one event, freed when the last one that refers to it has gone, and the device is done."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._process = 0
        self.event = runtime.create_shared_event(device)
        try:
            self.address = runtime.allocate(byte_size, device)
        except BaseException:
            runtime.destroy_event(self.event, device)
            raise
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child it is not ours
            runtime, address, event, device = self._runtime, self.address, self.event, self._device

            def free() -> None:
                try:
                    runtime.destroy_event(event, device)
                finally:
                    runtime.free(address, device)

            runtime.retired.add(device, free)
