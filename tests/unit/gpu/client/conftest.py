"""A client in virtual process 0 of the fake driver, and a model in process 1."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import PoolOptions, Result, ShmClient
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.testing.fake_cuda.driver import Tensor
from tests.unit.fake_server import config
from tests.unit.fake_wires import client_of
from tests.unit.gpu import fakes
from tests.unit.gpu.client.gpu_server import GpuServer
from tests.unit.gpu.fakes import BLOCK, DRIVER, runtime_that_gives_all_back, stream_on

X = np.arange(600, dtype=np.float32)
PLACE = (X.shape, X.dtype, "cuda:0")
ON_GPU = {"OUT0": PLACE}
ON_HOST = {"OUT0": X.nbytes}


@pytest.fixture
def cuda() -> Iterator[CudaAccess]:
    with runtime_that_gives_all_back() as runtime:
        yield CudaAccess(lambda: runtime)


@pytest.fixture
def runtime(cuda: CudaAccess) -> CudaRuntime:
    return cuda.runtime


@pytest.fixture
def stream(runtime: CudaRuntime) -> Iterator[int]:
    with stream_on(runtime) as stream:
        yield stream


@pytest.fixture
def server(cuda: CudaAccess) -> Iterator[GpuServer]:
    with contextlib.closing(GpuServer(config("m"), config("two", count=2))) as server:
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
def pool_region() -> RegionName:
    return "auto"


@pytest.fixture
def client(server: GpuServer, cuda: CudaAccess, pool_region: RegionName) -> Iterator[ShmClient]:
    with gpu_client(server, cuda, lend_bytes=0, region=pool_region) as client:
        yield client


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what only waits for the collector, too."""
    fakes.wait_until(lambda: gc.collect() >= 0 and holds())


def tensor_of(values: npt.NDArray[Any], begin: int = 0, kind: Any = "device") -> Tensor:
    """Return a tensor that begins at an element of an allocation of whole blocks, as those of a library's pool do."""
    allocation = DRIVER.tensor(np.zeros(BLOCK // values.itemsize, values.dtype), kind=kind)
    tensor = allocation[begin : begin + len(values)]
    tensor.peek()[...] = values
    return tensor


def address_of(result: Result) -> int:
    """Return where an output is that is on a GPU, and keep no array of it."""
    array: Any = result["OUT0"]
    assert isinstance(array, DeviceArray)
    return array.address


def now(address: int) -> npt.NDArray[Any]:
    return DRIVER.memory(address, X.shape, X.dtype)


def on_host(result: Result) -> npt.NDArray[Any]:
    array: Any = result["OUT0"]
    assert isinstance(array, DeviceArray)
    return array.to_host()


def doubled(client: ShmClient, x: Any, **options: Any) -> npt.NDArray[Any]:
    return on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU, **options))
