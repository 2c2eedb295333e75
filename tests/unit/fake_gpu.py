"""What tests need around a fake GPU."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaError
from shm_backend_utils.testing.fake_cuda.memory import KEY_PREFIX
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, LiveCounts

__all__ = [
    "BYTES",
    "INTEGERS",
    "INVALID_HANDLE",
    "INVALID_VALUE",
    "SIZE",
    "bytes_at",
    "fails_by",
    "in_another_thread",
    "numbers",
    "objects_of",
    "run_python",
    "runtime_that_gives_all_back",
    "that_nobody_loads",
]

SIZE: Final = 1000
BYTES: Final = np.dtype(np.uint8)
INTEGERS: Final = np.dtype(np.int32)
INVALID_VALUE: Final = "cudaErrorInvalidValue"
INVALID_HANDLE: Final = "cudaErrorInvalidResourceHandle"


@contextlib.contextmanager
def runtime_that_gives_all_back() -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    yield cuda
    if cuda.live != LiveCounts():
        gc.collect()  # what only waits for the collector is no leak
    assert cuda.live == LiveCounts()


@contextlib.contextmanager
def that_nobody_loads(cuda: FakeCuda) -> Iterator[CudaAccess]:
    loaded: list[FakeCuda] = []

    def load() -> FakeCuda:
        loaded.append(cuda)
        return cuda

    yield CudaAccess(load)
    assert loaded == []


@contextlib.contextmanager
def fails_by(name: str) -> Iterator[None]:
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.name == name
    assert f"failed with {name}: " in str(caught.value)


def objects_of(pid: int) -> list[str]:
    """Return the names of all memory of a process' fake GPUs."""
    return [path.name for path in Path("/dev/shm").glob(f"{KEY_PREFIX}{pid}-*")]


def bytes_at(cuda: FakeCuda, address: int, length: int = SIZE, device: int = 0) -> FakeDeviceArray:
    return cuda.array(address, (length,), BYTES, device, None)


def numbers(cuda: FakeCuda, *shape: int) -> FakeDeviceArray:
    """Return 0, 1, 2 … on the current device, with nothing left to wait for."""
    array = cuda.empty(shape, INTEGERS)
    array.peek()[...] = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return array


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    begin = "import os, signal, sys\nfrom shm_backend_utils.testing.fake_cuda.runtime import *\n"
    return subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True, check=False)
