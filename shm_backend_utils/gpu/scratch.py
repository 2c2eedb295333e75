"""A session's own memory on GPUs, which it reuses."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from functools import partial
from typing import Any

import numpy as np

from .arrays.device_array import DeviceArray
from .errors import CudaError
from .ordering import OwnStreams
from .runtime import CudaRuntime, whole_blocks

__all__ = ["Scratch"]


class Scratch:
    """A session's own memory on GPUs. Thread-safe.

    An array's memory is free again when the array is gone *and* its GPU has finished the work that it had then. The
    next array that fits takes free memory. If no free memory fits, all of it on that GPU goes back to CUDA. So a
    session has only as much memory as its calls used at the same time.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.streams = OwnStreams(runtime)  # a stream that wrote a live array lives as long as the array
        self._runtime = runtime
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[int, int]]] = {}  # sizes and addresses, by GPU
        self._is_closed = False

    def array(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        *,
        written_on: int | None = None,
        streams: OwnStreams | None = None,
    ) -> DeviceArray:
        """Return a new array; readers on other streams wait for ``written_on``, one of ``streams``."""
        taken = _Taken(self, self._runtime, *self._take(math.prod(shape) * dtype.itemsize, device), device)
        taken.streams = streams
        return DeviceArray(self._runtime, taken.address, shape, dtype, device, taken, written_on=written_on)

    def put_back(self, byte_size: int, address: int, device: int) -> None:
        """Mark memory as free again. Call it after the GPU has finished with it."""
        with self._lock:
            if not self._is_closed:
                self._free.setdefault(device, []).append((byte_size, address))
                return
        self._runtime.free(address, device)

    def close(self) -> None:
        """Return free memory to CUDA now, and used memory when it becomes free. Twice is fine."""
        with self._lock:
            self._is_closed = True
            self.streams = OwnStreams(self._runtime)
            free, self._free = self._free, {}
        for device, blocks in free.items():
            for _, address in blocks:
                with contextlib.suppress(CudaError):  # memory that CUDA does not free is leaked; free the rest
                    self._runtime.free(address, device)

    def _take(self, byte_size: int, device: int) -> tuple[int, int]:
        """Return the size and the address of memory with at least ``byte_size`` bytes."""
        self._runtime.retired.collect()
        with self._lock:
            free = self._free.get(device, [])
            fitting = [block for block in free if block[0] >= byte_size]
            if fitting:
                block = min(fitting)
                free.remove(block)
                return block
            self._free[device] = []
        for _, address in free:
            with contextlib.suppress(CudaError):
                self._runtime.free(address, device)
        byte_size = whole_blocks(max(byte_size, 1))
        return byte_size, self._runtime.allocate(byte_size, device)


class _Taken:
    """The memory of one array, with a finalizer that neither waits nor calls CUDA."""

    def __init__(self, scratch: Scratch, runtime: CudaRuntime, byte_size: int, address: int, device: int) -> None:
        self.address = address
        self._scratch = scratch
        self._runtime = runtime
        self._byte_size = byte_size
        self._device = device
        self._process = os.getpid()
        self.streams: OwnStreams | None = None

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the memory is the parent's
            back = partial(self._scratch.put_back, self._byte_size, self.address, self._device)
            self._runtime.retired.add(self._device, back)
