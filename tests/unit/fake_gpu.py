"""Arrays, streams and kernels on GPUs that do not exist, for tests of sessions: a model, and a client of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.runtime import CudaRuntime, whole_blocks
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.gpus import PATIENCE_S, collect_all

__all__ = [
    "BLOCK",
    "BYTES",
    "CLIENT",
    "DRIVER",
    "INTEGERS",
    "MODEL",
    "SIZE",
    "array_on",
    "content",
    "held_back",
    "kernel",
    "left_of",
    "runtime_that_gives_all_back",
    "stream_on",
    "wait_until",
]

DRIVER: Final = FakeDriver.load()
MODEL: Final = 0
CLIENT: Final = 1
"""Virtual processes: objects of one are to the other what those of another process are."""
SIZE: Final = 1000
BLOCK: Final = whole_blocks(SIZE)
BYTES: Final = np.dtype(np.uint8)
INTEGERS: Final = np.dtype(np.int32)


def left_of(process: int) -> LiveCounts:
    """Return what a virtual process has not given back, but for idle streams, of which a session keeps a few."""
    return DRIVER.live(process)._replace(streams=0)


@contextlib.contextmanager
def runtime_that_gives_all_back(process: int = MODEL) -> Iterator[CudaRuntime]:
    """Give the CUDA of a virtual process, in which nothing is left at the end, and nothing undefined was done."""
    DRIVER.forget()
    before = left_of(process)
    runtime = DRIVER.runtime(process)
    yield runtime
    gc.collect()  # what only waits for the collector is no leak
    collect_all(runtime)
    wait_until(lambda: left_of(process) == before)  # what is freed on a stream is free when the stream comes to it
    assert DRIVER.violations() == []


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def stream_on(runtime: CudaRuntime, device: int = 0) -> Iterator[int]:
    """Give a user's own stream."""
    stream = runtime.create_stream(device)
    yield stream
    runtime.synchronize_stream(stream, device)
    runtime.destroy_stream(stream, device)


def content(array: Any, offset: int = 0) -> npt.NDArray[Any]:
    """Return the memory of an array on a GPU as it is now, whatever is on streams."""
    return DRIVER.memory(array.address + offset, array.shape, array.dtype)


class _Owned:
    """Memory that a test has allocated, freed with its last array."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        self.address = runtime.allocate(byte_size, device)
        self._runtime = runtime
        self._device = device

    def __del__(self) -> None:
        self._runtime.retired.add(self._device, lambda: self._runtime.free(self.address, self._device))


def array_on(runtime: CudaRuntime, values: npt.ArrayLike, device: int = 0, dtype: Any = np.float32) -> DeviceArray:
    """Return an array on a GPU with these values, with nothing left to wait for."""
    given = np.asarray(values, dtype)
    owned = _Owned(runtime, max(given.nbytes, 1), device)
    array = DeviceArray(runtime, owned.address, given.shape, given.dtype, device, owned)
    content(array)[...] = given
    return array


def kernel(
    stream: int, function: Callable[..., object], *arrays: Any, process: int = MODEL, late_s: float = 0.01
) -> None:
    """Put a function of the arrays' memory on a stream; it begins late, as on a busy GPU."""
    memories = [content(array) for array in arrays]

    def run() -> None:
        time.sleep(late_s)
        function(*memories)

    DRIVER.launch(stream, run, process)


@contextlib.contextmanager
def held_back(stream: int, process: int = MODEL) -> Iterator[threading.Event]:
    """Put work on a stream that takes until the event is set, at the latest until the end of the block."""
    finish = threading.Event()
    DRIVER.launch(stream, lambda: finish.wait(PATIENCE_S), process)
    try:
        yield finish
    finally:
        finish.set()
