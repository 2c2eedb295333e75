"""A manager of shared memory with a fake GPU, and a client that has memory on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import SharedMemoryManager
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import SIZE, objects_of, runtime_that_gives_all_back
from tests.unit.manager_cuda.device_claims import DEVICE, Model


@pytest.fixture
def client() -> Iterator[FakeCuda]:
    """The CUDA of the process whose memory it is."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
    assert objects_of(os.getpid()) == []


@pytest.fixture
def cuda(client: FakeCuda) -> Iterator[FakeCuda]:
    """The CUDA of the model's process."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def allocation(client: FakeCuda) -> Iterator[CudaAllocation]:
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
def manager(cuda: FakeCuda, region: ManagedRegion) -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    yield manager
    manager.unregister_all()


@pytest.fixture
def model(cuda: FakeCuda, region: ManagedRegion) -> Iterator[Model]:
    model = Model(lambda: cuda, region)
    yield model
    model.resolver.close()
