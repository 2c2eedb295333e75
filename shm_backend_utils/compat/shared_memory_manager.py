"""Regions that this process maps, by name, with the semantics of the server's ``SharedMemoryManager``.

Use it on its own: a session does not need it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..dtypes import BY_NAME
from ..errors import CallerError, RegionGoneError, RegionRefusedError
from ..gpu.memory.access import CudaAccess
from ..memory.segment import SystemSegment
from ..memory.shared_file import SharedFile
from ..model.mapping.mapped import MappedRegion
from ..model.mapping.registry import Registry
from ..model.mapping.resolver import collect_all
from ..tensors.view import BufferAttributes

__all__ = ["MemoryInfo", "RegionStatus", "SharedMemoryManager"]

_MAX_INT64: Final = 2**63 - 1


class RegionStatus(NamedTuple):
    """The memory that is registered under a name."""

    name: str
    key: str
    offset: int
    byte_size: int


class MemoryInfo(NamedTuple):
    """A part of a region: ``memory`` is a writable array of uint8, NumPy's or a DeviceArray, and keeps it mapped."""

    memory: Any
    attributes: BufferAttributes


class SharedMemoryManager:
    """Registers, finds and unregisters mapped regions. Thread-safe.

    Parameters
    ----------
    max_mapped_bytes : int, optional
        How much may be mapped at once. Unused regions are unmapped to make room, the longest unused first.
    cuda : CudaAccess, optional
        For memory of GPUs.
    """

    def __init__(self, max_mapped_bytes: int | None = None, cuda: CudaAccess | None = None) -> None:
        self._cuda = cuda or CudaAccess()
        self._registry = Registry(max_mapped_bytes)
        self._lock = threading.Lock()
        self._statuses: dict[str, RegionStatus] = {}  # of the regions with a name there

    def register_system_shared_memory(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a POSIX shared-memory object, and register a part of it under a free name.

        The key is the object's name in /dev/shm, with or without a leading slash. A taken name or an impossible range
        is a CallerError, a missing object a RegionGoneError. If the object is too small or may not be opened, it is a
        RegionRefusedError; if too much is mapped already, a MachineError.
        """
        _check_range(name, offset, byte_size, _MAX_INT64)
        file = key.removeprefix("/")
        if not file or "/" in file or file in (".", ".."):
            raise RegionRefusedError(f"region {name!r}", "its key is not the name of an object directly in /dev/shm")

        def map_file() -> MappedRegion:
            with SharedFile.open(file, f"region {name!r}") as opened:
                self._registry.check_room(opened)
                return MappedRegion(SystemSegment.map_part(opened, offset, byte_size))

        self._register(RegionStatus(name, file, offset, byte_size), map_file)

    def register_cuda_shared_memory(self, name: str, handle: bytes, byte_size: int, device_id: int) -> None:
        """Map device memory that another process exported, and register it under a name, which keeps it mapped.

        The handle is the 64 bytes of CUDA IPC, and ``device_id`` this process' number of the GPU. It raises as
        :meth:`register_system_shared_memory`, and a MachineError without cuda-bindings or a GPU.
        """
        _check_range(name, 0, byte_size, _MAX_INT64)

        def map_memory() -> MappedRegion:
            return MappedRegion(self._cuda.mappings.map(handle, byte_size, device_id, f"region {name!r}"))

        self._register(RegionStatus(name, "", 0, byte_size), map_memory)

    def get_memory_info(self, name: str, offset: int, byte_size: int) -> MemoryInfo:
        """Return a part of the bytes that have a name, as an array that keeps them mapped.

        An unknown name or a removed object is a RegionGoneError, a truncated object a RegionRefusedError, and a part
        beyond the named bytes a CallerError.
        """
        region, status = self._find(name)
        _check_range(name, offset, byte_size, status.byte_size)
        region.segment.check(status.offset + status.byte_size, f"region {name!r}")
        region.last_use = time.monotonic()
        place, uint8 = status.offset + offset, BY_NAME["UINT8"]
        view = region.memory.view(name, place, byte_size, uint8, (byte_size,), writable=True)
        assert view is not None
        return MemoryInfo(view.array, view.attributes)

    def unregister(self, name: str) -> None:
        """Free a name. A region without a name is unmapped after its last use. A name that is already free is fine."""
        self._registry.free_name(name)
        collect_all(self._cuda)

    def unregister_all(self) -> None:
        """Free every name."""
        self._registry.free_all_names()
        collect_all(self._cuda)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Return the registration of a name, or of every name; RegionGoneError for an unknown one."""
        statuses, names = self._statuses, list(self._registry.names)
        return [self._find(name)[1]] if name else [statuses[each] for each in names if each in statuses]

    @property
    def mapped_bytes(self) -> int:
        """How many bytes are mapped."""
        return self._registry.mapped()[0]

    @property
    def mapped_regions(self) -> int:
        """How many regions are mapped."""
        return self._registry.mapped()[1]

    def _register(self, status: RegionStatus, opener: Callable[[], MappedRegion]) -> None:
        name, names = status.name, self._registry.names
        with self._lock:
            if name in names:
                raise CallerError(f"region {name!r} is registered already; unregister it first")
            self._statuses = {each: self._statuses[each] for each in self._statuses.keys() & names} | {name: status}
            self._registry.obtain(name, opener, f"region {name!r}")

    def _find(self, name: str) -> tuple[MappedRegion, RegionStatus]:
        region, status = self._registry.names.get(name), self._statuses.get(name)
        if region is None or status is None:
            raise RegionGoneError(f"region {name!r} is not registered")
        return region, status


def _check_range(name: str, offset: int, byte_size: int, size: int) -> None:
    if offset < 0 or byte_size < 0 or offset + byte_size > size:
        raise CallerError(
            f"bytes {offset} to {offset + byte_size} of region {name!r} were asked for; expected 0 to {size}"
        )
