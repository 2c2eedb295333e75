"""GPU memory of a client's slots: allocated up to a budget, and freed when no model maps it any more."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ...errors import BudgetError, MachineError
from ...memory import locks
from ...memory.descriptors import PRIVATE, Access, Descriptor
from ...memory.managed import RegionKind, roomy
from ...memory.pool.slot import SlotRegion
from ...memory.repeater import Repeater
from ...process import call_after_fork
from ..errors import CudaError
from ..runtime import BLOCK_BYTES, whole_blocks
from .access import CudaAccess
from .allocations import Allocation, CudaAllocation
from .by_descriptor import DescriptorAllocation

__all__ = ["DeviceBank", "ShortOfMemoryError", "rounded_up"]

_ROUND_S: Final = 0.05
_FINALIZERS_PATIENCE_S: Final = 0.5


def rounded_up(byte_size: int) -> int:
    """Return a size up to an eighth larger, so that similar calls find memory of the same size."""
    return roomy(byte_size, BLOCK_BYTES)


class ShortOfMemoryError(MachineError):
    """There is not enough device memory now, but there may be later."""


class _GivenUp(NamedTuple):
    """GPU memory that models may still map, and the objects to release after that memory."""

    is_in_use: Callable[[], bool]
    descriptor: Descriptor | None  # of the region where users hold leases, if there is a region
    allocations: tuple[Allocation, ...]
    kept: list[object]

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            self.descriptor.close()


class DeviceBank:
    """Device memory of one client, at most ``max_bytes`` on each device. Thread-safe. CUDA is loaded on first use.

    Models get the memory of a sealed region as they get the region, by a descriptor, if the device can do that. They
    get all other memory by CUDA IPC.
    """

    def __init__(self, cuda: CudaAccess, max_bytes: int | None, access: Access = PRIVATE) -> None:
        self.cuda = cuda
        self._max_bytes = max_bytes
        self._access = access  # of models to sealed regions, and so to their memory here
        self._lock = threading.Lock()
        self._byte_sizes: Counter[int] = Counter()
        self._in_regions: dict[int, object] = {}  # keeps the memory of regions alive even if a finalizer fails
        self._given_up: deque[_GivenUp] = deque()  # finalizers append to this queue without a lock
        self._starting = threading.Lock()
        self._collector: Repeater | None = None
        call_after_fork(self)

    def provide(self, region: SlotRegion, devices: Iterable[int], byte_sizes: Iterable[int]) -> None:
        """Give a region memory on each device where it has none; the sizes come from :func:`rounded_up`."""
        self.take_care_of(region)  # first, so that its memory is freed even if this fails
        for device, byte_size in zip(devices, byte_sizes, strict=True):
            if device not in region.device_memory:
                region.device_memory[device] = self._allocate(region.kind, device, whole_blocks(byte_size))

    def take_care_of(self, region: SlotRegion) -> None:
        """Take over a region's GPU memory, its own and the user's, when the region is destroyed."""
        self._in_regions[id(region.device_memory)] = region.device_memory, region.borrowed
        region.on_destroy = self._give_up

    def keep_while(self, is_in_use: Callable[[], bool], what: object) -> None:
        """Keep an object while a GPU uses it; ``is_in_use`` is polled."""
        self._given_up.append(_GivenUp(is_in_use, None, (), [what]))
        self._free_later()

    def collect(self) -> bool:
        """Let a thread, which waits for GPUs, free unused memory. Return whether some is left to be freed.

        The caller must not wait: a stream may wait for a dead model until :meth:`keep_while` lets it go on.
        """
        self._retire()
        self.cuda.collect_soon()
        return self.cuda.has_retired or bool(self._given_up)

    def close(self) -> None:
        """Let a thread free all memory when models release it; the end of this process frees it, too."""
        self._retire()
        if self.cuda.has_retired or self._given_up:
            self._free_later()

    def abandon(self) -> None:
        """Close from a finalizer, which may run while its own thread holds the lock."""
        if self._given_up and self._lock.acquire(timeout=_FINALIZERS_PATIENCE_S):
            try:
                self._collect()
            finally:
                self._lock.release()
        if self.cuda.has_retired or self._given_up:
            self._free_later()

    def after_fork(self) -> None:
        """Forget all memory in a forked child, which cannot use its parent's device memory."""
        self._lock = threading.Lock()  # the parent's other threads may have held it, and do not run here
        self._starting = threading.Lock()
        self._collector = None
        self._in_regions.clear()
        while self._given_up:
            self._given_up.popleft().close()

    def _give_up(self, region: SlotRegion, descriptor: Descriptor) -> None:
        """Keep a destroyed region's GPU memory until all uses have ended; this never waits."""
        held, borrowed = region.device_memory, region.borrowed
        kept = [*borrowed, *(slot.kept for slot in region.slots)]
        records = [slot.record_offset for slot in region.slots if slot.kept]

        def is_in_use() -> bool:
            fd = descriptor.fileno()
            return locks.has_users(fd) or any(locks.is_slot_in_use(fd, record) for record in records)

        self._given_up.append(_GivenUp(is_in_use, descriptor, tuple(held.values()), kept))
        held.clear()
        borrowed.clear()
        for slot in region.slots:
            slot.kept = ()
        self._in_regions.pop(id(held), None)

    def _retire(self) -> None:
        """Retire the memory that models do not map any more."""
        if self._given_up:
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        for _ in range(len(self._given_up)):
            each = self._given_up[0]
            if each.is_in_use():
                self._given_up.rotate(-1)
                continue
            self._given_up.popleft()
            each.close()
            for allocation in each.allocations:
                allocation.free()
                self._byte_sizes[allocation.device] -= allocation.byte_size
            self.cuda.drop(each.kept)  # not here: this thread lets streams go on, and holds the lock

    def _free_later(self) -> None:
        # Finalizers must not wait: if another thread holds the lock, leave the start of the collector to that thread.
        while self._collector is None and self._starting.acquire(blocking=False):
            try:
                if self._collector is None:
                    self._collector = Repeater(self._collect_until_all_is_free, _ROUND_S, "shm device memory")
            finally:
                self._starting.release()

    def _allocate(self, kind: RegionKind, device: int, byte_size: int) -> Allocation:
        limit = self._max_bytes
        if limit is not None and byte_size > limit:
            raise BudgetError(
                f"the call needs {byte_size} bytes on GPU {device}, but the pool may have {limit}; raise "
                "PoolOptions(max_device_bytes=...), or send less at once"
            )
        most = self.cuda.runtime.total_bytes(device)
        if byte_size > most:
            raise BudgetError(f"the call needs {byte_size} bytes on GPU {device}, which has {most}; send less at once")
        self._retire()
        if self.cuda.has_retired:
            self._free_later()
        with self._lock:
            if limit is not None and self._byte_sizes[device] + byte_size > limit:
                raise ShortOfMemoryError(
                    f"{self._byte_sizes[device]} of {limit} bytes on GPU {device} are in use; release results and "
                    "arrays there, or raise PoolOptions(max_device_bytes=...)"
                )
            self._byte_sizes[device] += byte_size
        try:
            made: Allocation | None = None
            if kind is RegionKind.SEALED:
                made = DescriptorAllocation.make(self.cuda.runtime, byte_size, device, self._access)
            return made or CudaAllocation(self.cuda.runtime, byte_size, device)
        except BaseException as error:
            with self._lock:
                self._byte_sizes[device] -= byte_size
            if isinstance(error, CudaError) and error.name == "CUDA_ERROR_OUT_OF_MEMORY":
                raise ShortOfMemoryError(str(error)) from None
            raise

    def _collect_until_all_is_free(self) -> float:
        is_left = self.collect()
        collector = self._collector
        if not is_left and collector is not None:
            self._collector = None
            collector.stop_some_time()
            if self._given_up or self.cuda.has_retired:  # more memory came after the check above
                self._free_later()
        return _ROUND_S
