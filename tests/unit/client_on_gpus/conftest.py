"""A client in virtual process 0 of the fake driver, and a model in process 1."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import PoolOptions, Result, ShmClient
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import BLOCK_BYTES
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, Tensor
from tests.unit.client_on_gpus.gpu_server import GpuServer
from tests.unit.fake_server import config
from tests.unit.fake_wires import client_of
from tests.unit.gpus import PATIENCE_S


@pytest.fixture
def cuda(driver: FakeDriver) -> Iterator[CudaAccess]:
    """CUDA as the client has it."""
    access = CudaAccess(driver.runtime)
    yield access
    gc.collect()
    wait_until(lambda: not access.collect())


@pytest.fixture
def server(driver: FakeDriver) -> Iterator[GpuServer]:
    server = GpuServer(driver, config("m"), config("two", count=2))
    with server:
        yield server


@contextlib.contextmanager
def gpu_client(server: GpuServer, cuda: CudaAccess, **options: Any) -> Iterator[ShmClient]:
    """Connect a client, and see that it frees what it had when the model has let go of it."""
    with client_of(server, cuda=cuda, pool=PoolOptions(**options)) as client:
        yield client
    bank = client._memory.bank
    server.sweep()
    wait_until(lambda: not bank.collect())


@pytest.fixture
def client(server: GpuServer, cuda: CudaAccess) -> Iterator[ShmClient]:
    """A client that lends everything it can."""
    with gpu_client(server, cuda, lend_bytes=0) as client:
        yield client


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, and collect garbage meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.005)


def tensor_of(driver: FakeDriver, values: npt.NDArray[Any], begin: int = 0, kind: Any = "device") -> Tensor:
    """Return a tensor that begins at an element of an allocation of whole blocks, as those of a library's pool do."""
    allocation = driver.tensor(np.zeros(BLOCK_BYTES // values.itemsize, values.dtype), kind=kind)
    tensor = allocation[begin : begin + len(values)]
    tensor.peek()[...] = values
    return tensor


def on_host(result: Result, name: str = "OUT0") -> npt.NDArray[Any]:
    """Return a copy of an output that is on a GPU."""
    array: Any = result[name]
    assert isinstance(array, DeviceArray)
    return array.to_host()


__all__ = ["gpu_client", "on_host", "tensor_of", "wait_until"]
