"""A session's own memory on GPUs, which it reuses."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .arrays.device_array import DeviceArray
from .errors import CudaError
from .ordering import OwnStreams
from .runtime import CudaRuntime, whole_blocks

__all__ = ["Block", "Dropped", "Scratch"]


class Block(NamedTuple):
    """Memory of a session on a GPU."""

    byte_size: int
    address: int
    device: int


class Dropped:
    """The blocks whose arrays were dropped while their call ran. Thread-safe."""

    def __init__(self, free: Callable[[Block], None]) -> None:
        self._free = free
        self._blocks: deque[Block] = deque()
        self._is_over = False

    def add(self, block: Block) -> None:
        """Keep a block, or free it if the call is over. Finalizers may call this."""
        self._blocks.append(block)
        if self._is_over:
            self._free_all()

    def take(self) -> list[Block]:
        """Return the blocks that were dropped so far; they are free after the GPUs have done their present work."""
        taken: list[Block] = []
        with contextlib.suppress(IndexError):  # the end; other threads may take blocks, too
            while True:
                taken.append(self._blocks.popleft())
        return taken

    def end(self) -> None:
        """End the call: memory that is dropped from now on may be in use on any stream, so CUDA frees it."""
        self._is_over = True  # first: a finalizer that comes later frees its block itself
        self._free_all()

    def _free_all(self) -> None:
        for block in self.take():
            self._free(block)


class Scratch:
    """A session's own memory on GPUs. Thread-safe.

    The memory of an array that is dropped while its call runs is free again when the GPUs have finished the call's
    work. The next array that fits takes free memory. Memory of other arrays goes back to CUDA, which waits for the GPU.
    If no free memory fits, all of it on that GPU goes back to CUDA. So a session has only as much memory as its calls
    used at the same time.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.streams = OwnStreams(runtime)  # a stream that wrote a live array lives as long as the array
        self._runtime = runtime
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}  # by GPU
        self._is_closed = False

    def array(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        dropped: Dropped | None = None,
        *,
        written_on: int | None = None,
        streams: OwnStreams | None = None,
    ) -> DeviceArray:
        """Return a new array; readers on other streams wait for ``written_on``, one of ``streams``.

        When it is dropped, its memory goes to ``dropped``; without that, to CUDA.
        """
        block = self._take(math.prod(shape) * dtype.itemsize, device)
        taken = _Taken(self.retire if dropped is None else dropped.add, block, streams)
        return DeviceArray(self._runtime, block.address, shape, dtype, device, taken, written_on=written_on)

    def put_back(self, blocks: Iterable[Block]) -> None:
        """Mark memory as free again, after the GPUs have finished with it."""
        for block in blocks:
            with self._lock:
                if not self._is_closed:
                    self._free.setdefault(block.device, []).append(block)
                    continue
            self.retire(block)

    def retire(self, block: Block) -> None:
        """Let a thread return memory to CUDA, which waits for the GPU. Finalizers may call this."""
        self._runtime.retired.add(partial(self._runtime.free, block.address, block.device))

    def close(self) -> None:
        """Return free memory to CUDA, and used memory when it becomes free. Twice is fine."""
        with self._lock:
            self._is_closed = True
            self.streams = OwnStreams(self._runtime)
            free, self._free = self._free, {}
        for blocks in free.values():
            for block in blocks:
                self.retire(block)

    @staticmethod
    def owns(array: Any) -> bool:
        """Return whether an array is one of :meth:`array`, or a part of one."""
        return isinstance(array.owner, _Taken)

    def _take(self, byte_size: int, device: int) -> Block:
        """Return memory with at least ``byte_size`` bytes."""
        retired = self._runtime.retired
        retired.poll()  # memory of a call that has ended early may be free by now
        with self._lock:
            free = self._free.get(device, [])
            fitting = list(filter(lambda block: block.byte_size >= byte_size, free))
            if fitting:
                block = min(fitting)
                free.remove(block)
                return block
            self._free[device] = []
        for block in free:
            self.retire(block)
        retired.collect_soon()
        byte_size = whole_blocks(max(byte_size, 1))
        try:
            return Block(byte_size, self._runtime.allocate(byte_size, device), device)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        retired.collect_now()
        return Block(byte_size, self._runtime.allocate(byte_size, device), device)


class _Taken:
    """The memory of one array, with a finalizer that neither waits nor calls CUDA."""

    def __init__(self, give_back: Callable[[Block], None], block: Block, streams: OwnStreams | None) -> None:
        self.streams = streams
        self._give_back = give_back
        self._block = block
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the memory is the parent's
            self._give_back(self._block)
