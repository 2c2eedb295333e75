"""The memory of a GPU that is none: POSIX shared memory, which other processes open by a handle, as by CUDA's IPC.

As a GPU's memory does, it goes with the process that allocated it: an object whose owner's lease is free opens no more.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import RegionGoneError, RegionRefusedError
from ...memory.cuda.runtime import HANDLE_LENGTH, CudaError
from ...memory.locks import hold_owner_lease, is_owner_alive
from ...memory.segment import SystemSegment

__all__ = ["KEY_PREFIX", "FakeMemory", "IpcHandle", "remove_what_the_dead_left"]

KEY_PREFIX: Final = "shmbu-fake-cuda-"

_FIELD: Final = "memory of the fake GPU"
_LAYOUT: Final = struct.Struct("=4sI8s8s16s")
_MAGIC: Final = b"FAKE"
_UNINITIALIZED: Final = 0xA5  # new memory is not zero: whoever relies on that shall notice


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """What the 64 bytes of a handle say.

    Attributes
    ----------
    owner_pid : int
    object_id : bytes
        8 random bytes, a new number for every allocation.
    exporter : bytes
        8 bytes that no two runtimes share, be they in one process or not.
    device_uuid : str
        32 hexadecimal digits.
    """

    owner_pid: int
    object_id: bytes
    exporter: bytes
    device_uuid: str

    @property
    def key(self) -> str:
        """The name of the shared-memory object."""
        return f"{KEY_PREFIX}{self.owner_pid}-{self.object_id.hex()}"

    def encode(self) -> bytes:
        """Return the 64 bytes."""
        content = _LAYOUT.pack(_MAGIC, self.owner_pid, self.object_id, self.exporter, bytes.fromhex(self.device_uuid))
        return content.ljust(HANDLE_LENGTH, b"\0")

    @classmethod
    def decode(cls, handle: bytes) -> IpcHandle | None:
        """Return what a handle says; None if it is none of the fake GPU's."""
        if len(handle) != HANDLE_LENGTH or not handle.startswith(_MAGIC):
            return None
        _, owner_pid, object_id, exporter, uuid = _LAYOUT.unpack_from(handle)
        return cls(owner_pid, object_id, exporter, uuid.hex())


class FakeMemory:
    """One allocation, as it is mapped by one runtime. Released at the latest when nothing refers to it any more.

    Attributes
    ----------
    address : int
        Where it is mapped in this process.
    byte_size : int
        As allocated.
    device : int
    handle : IpcHandle
    users : int
        How often its runtime has opened it.
    """

    def __init__(self, segment: SystemSegment, device: int, handle: IpcHandle, unlinking_pid: int | None) -> None:
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(segment.buffer(), np.uint8)
        self.address = self._bytes.ctypes.data
        self.byte_size = segment.byte_size
        self.device = device
        self.handle = handle
        self.users = 1
        self._let_go = weakref.finalize(self, _let_go, segment, unlinking_pid)

    @classmethod
    def allocate(cls, byte_size: int, device: int, handle: IpcHandle) -> FakeMemory:
        """Make new memory, full of rubbish; raises MachineError if there is not so much left."""
        segment = SystemSegment.create(
            handle.key, byte_size, prepare=lambda segment: hold_owner_lease(segment.fileno())
        )
        memory = cls(segment, device, handle, os.getpid())
        memory.view(memory.address, (byte_size,), np.dtype(np.uint8), (1,)).fill(_UNINITIALIZED)
        return memory

    @classmethod
    def open(cls, device: int, handle: IpcHandle) -> FakeMemory:
        """Map what another runtime has allocated; raises RegionGoneError or RegionRefusedError."""
        segment = SystemSegment.open(handle.key, 1, _FIELD)
        if not is_owner_alive(segment.fileno()):
            segment.unlink()
            segment.close()
            raise RegionGoneError(f"the owner of {_FIELD} is dead")
        return cls(segment, device, handle, None)

    def contains(self, address: int) -> bool:
        """Return whether an address lies in this memory."""
        return self.address <= address < self.address + self.byte_size

    def view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """Return a writable view; raises CudaError if the memory was released, as a kernel's access would fail."""
        if self._bytes is None:
            raise CudaError("access to memory that was freed or closed", "cudaErrorIllegalAddress")
        view: npt.NDArray[Any] = np.ndarray(shape, dtype, self._bytes, address - self.address, strides)
        return view

    def release(self) -> None:
        """Unmap the memory, and free it if this runtime allocated it. Twice is fine."""
        self._bytes = None
        self._let_go()


def remove_what_the_dead_left() -> None:
    """Remove the memory of processes that were killed, which a GPU's driver would free."""
    for path in Path("/dev/shm").glob(f"{KEY_PREFIX}*"):
        with contextlib.suppress(RegionGoneError, RegionRefusedError):
            segment = SystemSegment.open(path.name, 1, _FIELD)
            if not is_owner_alive(segment.fileno()):
                segment.unlink()
            segment.close()


def _let_go(segment: SystemSegment, unlinking_pid: int | None) -> None:
    if unlinking_pid == os.getpid():  # a forked child must leave its parent's memory alone
        segment.unlink()
    segment.close()
