"""One mapping of this process, of any kind: its names, its users, and whether its owner has given it up."""

from __future__ import annotations

import contextlib

import numpy as np

from ..errors import MachineError
from ..memory.cuda.memory import CudaMapping
from ..memory.managed import ManagedRegion
from ..memory.segment import SystemSegment
from ..tensors.attributes import MemoryType
from .memory import DeviceMemory, HostMemory, Memory
from .pinning import Pin, Pinning

__all__ = ["MappedRegion"]


class MappedRegion:
    """One mapping, its names, and its users.

    Parameters
    ----------
    opened : ManagedRegion, SystemSegment or CudaMapping
        Owned: closing this closes it.
    fence : MappedRegion, optional
        The managed region whose slot fences this memory: both have one owner.
    pinning : Pinning, optional
        Pins it when it is kept, if it is memory of the host.

    Attributes
    ----------
    segment : SystemSegment or CudaMapping
        What is mapped.
    managed : ManagedRegion or None
        The same with its header, if the region is one of ours.
    memory : Memory
        The whole mapping, writable.
    """

    __slots__ = (
        "_fence",
        "_pin",
        "_pinning",
        "is_doomed",
        "last_use",
        "managed",
        "memory",
        "names",
        "segment",
        "use_count",
    )

    def __init__(
        self,
        opened: ManagedRegion | SystemSegment | CudaMapping,
        fence: MappedRegion | None = None,
        pinning: Pinning | None = None,
    ) -> None:
        self.managed = opened if isinstance(opened, ManagedRegion) else None
        self.segment = opened.segment if isinstance(opened, ManagedRegion) else opened
        self.memory = _memory_of(self.segment)
        self.names: set[str] = set()
        self.use_count = 0
        self.last_use = 0
        self.is_doomed = False
        self._fence = fence
        self._pinning = pinning
        self._pin: Pin | None = None

    @property
    def managed_segment(self) -> SystemSegment | None:
        """The segment, if the region is one of ours."""
        return None if self.managed is None else self.managed.segment

    @property
    def is_abandoned(self) -> bool:
        """Whether the owner has unlinked it, or left it behind when it died. Of device memory only its fence tells."""
        if isinstance(self.segment, CudaMapping):
            return self._fence is not None and self._fence.is_abandoned
        return (self.managed is not None and self.managed.is_orphaned) or self.segment.is_unlinked

    def keep(self) -> None:
        """Take note that this is to be the process' mapping of its memory, which may have been mapped before."""
        if self._pinning is not None and isinstance(self.memory, HostMemory):
            self._pin = self._pinning.pin(self.memory.bytes())
            if self._pin is not None:
                self.memory = HostMemory(self.memory.bytes(), MemoryType.CPU_PINNED)

    def close(self) -> None:
        """Unmap, but for what arrays need."""
        if self._pin is not None:
            with contextlib.suppress(MachineError):  # the device is lost: nothing is pinned any more
                self._pin.undo()
            self._pin = None
        self.memory = HostMemory(np.empty(0, np.uint8))
        (self.managed or self.segment).close()


def _memory_of(segment: SystemSegment | CudaMapping) -> Memory:
    if isinstance(segment, CudaMapping):
        return DeviceMemory(segment, 0, segment.byte_size)
    return HostMemory(np.frombuffer(segment.buffer(), np.uint8))
