"""What a client's slots have on GPUs: allocated up to a budget, and freed when no model has it mapped any more."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from ...errors import BudgetError, MachineError
from ...forks import forsake_in_children
from .. import locks
from ..pool.slot import SlotRegion
from ..repeater import Repeater
from ..rounding import roomy
from .events import EventListener
from .memory import CudaAccess, CudaAllocation
from .runtime import CudaError, device_guard

__all__ = ["DeviceBank", "DeviceMemory", "ShortOfMemoryError", "rounded_up"]

_ROUND_S: Final = 0.05
_GRANULARITY: Final = 4096
_FINALIZERS_PATIENCE_S: Final = 0.5


def rounded_up(byte_size: int) -> int:
    """Return a size that is up to an eighth larger: similar calls then find memory of the same size."""
    return roomy(byte_size, _GRANULARITY)


class ShortOfMemoryError(MachineError):
    """There is not enough device memory now; later there may be."""


class DeviceMemory:
    """What a region has on a GPU beside its own memory.

    Attributes
    ----------
    allocation : CudaAllocation
    listener : EventListener
        Waits for what models do there.
    """

    def __init__(self, allocation: CudaAllocation, listener: EventListener) -> None:
        self.allocation = allocation
        self.listener = listener

    def array_at(self, owner: object, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """Return an array of CuPy over the memory, C-contiguous, writable, not cleared.

        Parameters
        ----------
        owner : object
            What the array keeps alive, beside this memory.
        offset : int
            Where it begins, in bytes.
        dtype, shape
            The array's.

        Raises
        ------
        ValueError
            It would end beyond this memory.
        """
        size = self.allocation.byte_size - offset
        array = self.allocation.array_at(offset, dtype, shape, size, owner)
        if array is None:
            raise ValueError(f"a tensor of shape {shape} in {size} bytes")
        return array

    def finish_writing(self) -> None:
        """Wait until the inputs that were put on the thread's current stream are written."""
        runtime = self.allocation.runtime
        with device_guard(runtime, self.allocation.device):
            runtime.synchronize(runtime.stream_address(runtime.current_stream()))


class _GivenUp(NamedTuple):
    """Memory of a slot that was destroyed, and the descriptor of its region, by which its users are seen."""

    fd: int
    allocations: tuple[CudaAllocation, ...]


class DeviceBank:
    """Device memory of one client. Thread-safe.

    Parameters
    ----------
    cuda : CudaAccess
        Loaded at first use.
    max_bytes : int or None
        What each device may give; None for all that it has.
    """

    def __init__(self, cuda: CudaAccess, max_bytes: int | None) -> None:
        self.cuda = cuda
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._byte_sizes: Counter[int] = Counter()
        self._given_up: deque[_GivenUp] = deque()  # appended to by finalizers, which wait for no lock
        self._collector: Repeater | None = None
        self._events: EventListener | None = None
        forsake_in_children(self)

    def provide(self, region: SlotRegion, devices: Iterable[int], byte_sizes: Iterable[int]) -> None:
        """Let a region have so much memory on these devices, unless it has.

        Parameters
        ----------
        region : SlotRegion
            Its ``device_memory`` has it then; when the region is destroyed, it is freed.
        devices, byte_sizes : iterable of int
            In this process' numbers; as :func:`rounded_up` returns sizes.

        Raises
        ------
        ShortOfMemoryError
            There is not enough now.
        BudgetError
            There never will be.
        MachineError
            CuPy or a GPU is missing.
        """
        for device, byte_size in zip(devices, byte_sizes, strict=True):
            if device not in region.device_memory:
                region.device_memory[device] = DeviceMemory(self._allocate(device, byte_size), self._listener())
        held = region.device_memory
        region.on_destroy = lambda fd: self._give_up(fd, held)

    def collect(self) -> bool:
        """Free what nobody uses any more. Return whether something is left to be freed."""
        if self._given_up:
            with self._lock:
                self._collect()
        return bool(self._given_up)

    def close(self) -> None:
        """Free what can be freed; the rest as soon as models have let go of it, or with this process."""
        if self._given_up:
            self.collect()
        self._free_later()

    def abandon(self) -> None:
        """Close, from a finalizer: if that has interrupted its own thread's locked section, it cannot wait for it."""
        if self._given_up and self._lock.acquire(timeout=_FINALIZERS_PATIENCE_S):
            try:
                self._collect()
            finally:
                self._lock.release()
        self._free_later()

    def forsake(self) -> None:
        """Forget everything, in a forked child, which cannot use its parent's device memory."""
        self._lock = threading.Lock()  # the parent's other threads may have held it, and do not run here
        while self._given_up:
            os.close(self._given_up.popleft().fd)

    def _give_up(self, fd: int, held: dict[int, DeviceMemory]) -> None:
        """Take over the memory of a region that was destroyed, to be freed when nobody uses it.

        ``fd`` is the region's, and is closed then. Waits for nothing: finalizers call this.
        """
        self._given_up.append(_GivenUp(fd, tuple([each.allocation for each in held.values()])))
        held.clear()

    def _collect(self) -> None:
        for _ in range(len(self._given_up)):
            each = self._given_up.popleft()
            if locks.has_users(each.fd):
                self._given_up.append(each)
                continue
            os.close(each.fd)
            for allocation in each.allocations:
                allocation.free()
                self._byte_sizes[allocation.device] -= allocation.byte_size

    def _free_later(self) -> None:
        if self._given_up and self._collector is None:
            self._collector = Repeater(self._collect_until_all_is_free, _ROUND_S, "shm device memory")

    def _listener(self) -> EventListener:
        with self._lock:
            if self._events is None:
                self._events = EventListener(self.cuda.runtime)
            return self._events

    def _allocate(self, device: int, byte_size: int) -> CudaAllocation:
        limit = self._max_bytes
        if limit is not None and byte_size > limit:
            raise BudgetError(
                f"the call needs {byte_size} bytes on GPU {device}, but the pool may have {limit}; raise "
                "PoolOptions(max_device_bytes=...), or send less at once"
            )
        self.collect()
        with self._lock:
            if limit is not None and self._byte_sizes[device] + byte_size > limit:
                raise ShortOfMemoryError(f"{self._byte_sizes[device]} of {limit} bytes on GPU {device} are in use")
            self._byte_sizes[device] += byte_size
        try:
            return CudaAllocation(self.cuda.runtime, byte_size, device)
        except BaseException as error:
            with self._lock:
                self._byte_sizes[device] -= byte_size
            if isinstance(error, CudaError) and error.name == "cudaErrorMemoryAllocation":
                raise ShortOfMemoryError(str(error)) from None
            raise

    def _collect_until_all_is_free(self) -> float:
        self.collect()
        collector = self._collector
        if not self._given_up and collector is not None:
            self._collector = None
            collector.stop_some_time()
        return _ROUND_S
