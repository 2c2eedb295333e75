"""A manager of shared memory, and a client that has memory on a GPU: virtual processes of the fake driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.fake_gpu import CLIENT, MODEL, SIZE, runtime_that_gives_all_back
from tests.unit.manager_cuda.device_claims import DEVICE, Model


@pytest.fixture
def client() -> Iterator[CudaRuntime]:
    """The CUDA of the process whose memory it is."""
    with runtime_that_gives_all_back(CLIENT) as cuda:
        yield cuda


@pytest.fixture
def cuda(client: CudaRuntime) -> Iterator[CudaRuntime]:
    """The CUDA of the model's process."""
    with runtime_that_gives_all_back(MODEL) as cuda:
        yield cuda


@pytest.fixture
def allocation(client: CudaRuntime) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client, SIZE, DEVICE)
    yield allocation
    allocation.free()


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    """The region whose slot fences the device memory, as the client has it."""
    region = ManagedRegion.create(100)
    yield region
    region.segment.unlink()
    region.close()


@pytest.fixture
def manager(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    yield manager
    manager.unregister_all()


@pytest.fixture
def model(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[Model]:
    model = Model(lambda: cuda, region)
    yield model
    model.resolver.close()
