"""All memory of the fake GPU that one runtime knows, and the rules for opening, closing and freeing it."""

from __future__ import annotations

import secrets
import threading
import weakref
from dataclasses import dataclass

from ...errors import MachineError, RegionGoneError, RegionRefusedError
from ...memory.cuda.runtime import CudaError
from .memory import FakeMemory, IpcHandle

__all__ = ["FakeMemories", "LiveCounts", "failure"]


@dataclass(frozen=True, slots=True)
class LiveCounts:
    """What a runtime holds: ``LiveCounts()`` is nothing.

    Attributes
    ----------
    allocations : int
        What was allocated and not freed, memory of arrays included.
    opened : int
        How often handles were opened and not closed.
    pinned : int
        Ranges of host memory.
    """

    allocations: int = 0
    opened: int = 0
    pinned: int = 0


def failure(method: str, name: str) -> CudaError:
    """Return CUDA's error of a name, as a method of the fake runtime raises it."""
    return CudaError(f"{method}() of the fake GPU", name)


class FakeMemories:
    """The memory of one runtime. Thread-safe.

    Parameters
    ----------
    pid : int
        The process of the runtime.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._exporter = secrets.token_bytes(8)
        self._lock = threading.RLock()  # finalizers may run inside it
        self._allocated: dict[int, FakeMemory] = {}
        self._opened: dict[int, FakeMemory] = {}
        self._of_arrays: weakref.WeakValueDictionary[int, FakeMemory] = weakref.WeakValueDictionary()

    @property
    def allocation_count(self) -> int:
        """How many allocations are not freed, those that arrays have for themselves included."""
        return len(self._allocated) + len(self._of_arrays)

    @property
    def opened_count(self) -> int:
        """How often handles were opened and not closed."""
        with self._lock:
            return sum(memory.users for memory in list(self._opened.values()))

    def allocate(self, byte_size: int, device: int, uuid: str) -> FakeMemory:
        """Make memory that stays until it is freed."""
        memory = self._new("allocate", byte_size, device, uuid)
        with self._lock:
            self._allocated[memory.address] = memory
        return memory

    def allocate_for_array(self, byte_size: int, device: int, uuid: str) -> FakeMemory:
        """Make memory that stays as long as somebody refers to it."""
        memory = self._new("empty", byte_size, device, uuid)
        with self._lock:
            self._of_arrays[memory.address] = memory
        return memory

    def allocated(self, address: int, method: str) -> FakeMemory:
        """Return the allocation that begins at an address and can be freed; CudaError if there is none."""
        memory = self._allocated.get(address)
        if memory is None:
            raise failure(method, "cudaErrorInvalidValue")
        return memory

    def free(self, address: int) -> None:
        """Free an allocation."""
        with self._lock:
            memory = self.allocated(address, "free")
            del self._allocated[address]
        memory.release()

    def open(self, handle: bytes, device: int, uuid: str) -> FakeMemory:
        """Map another runtime's memory. What is mapped already is counted, not mapped again: so does CUDA."""
        meant = IpcHandle.decode(handle)
        if meant is None:
            raise failure("open", "cudaErrorInvalidValue")
        if meant.exporter == self._exporter:
            raise failure("open", "cudaErrorDeviceUninitialized")
        if meant.device_uuid != uuid:
            raise failure("open", "cudaErrorMapBufferObjectFailed")
        with self._lock:
            for memory in list(self._opened.values()):
                if memory.handle == meant:
                    memory.users += 1
                    return memory
            memory = _mapped(meant, device)
            self._opened[memory.address] = memory
            return memory

    def close(self, address: int) -> None:
        """Undo :meth:`open`."""
        with self._lock:
            memory = self._opened.get(address)
            if memory is None:
                raise failure("close", "cudaErrorInvalidValue")
            memory.users -= 1
            if memory.users == 0:
                del self._opened[address]
                memory.release()

    def at(self, address: int, method: str) -> FakeMemory:
        """Return the memory that an address lies in; CudaError if it was freed or closed, or never was."""
        with self._lock:
            for memory in self._all():
                if memory.contains(address):
                    return memory
        raise failure(method, "cudaErrorInvalidValue")

    def _all(self) -> list[FakeMemory]:
        return [*self._allocated.values(), *self._opened.values(), *self._of_arrays.values()]

    def _new(self, method: str, byte_size: int, device: int, uuid: str) -> FakeMemory:
        if byte_size <= 0:
            raise failure(method, "cudaErrorInvalidValue")
        handle = IpcHandle(self._pid, secrets.token_bytes(8), self._exporter, uuid)
        try:
            return FakeMemory.allocate(byte_size, device, handle)
        except MachineError:
            raise failure(method, "cudaErrorMemoryAllocation") from None


def _mapped(handle: IpcHandle, device: int) -> FakeMemory:
    try:
        return FakeMemory.open(device, handle)
    except RegionGoneError:
        raise failure("open", "cudaErrorInvalidResourceHandle") from None
    except RegionRefusedError:
        raise failure("open", "cudaErrorMapBufferObjectFailed") from None
