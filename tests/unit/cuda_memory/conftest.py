"""The owner of device memory and the process that maps it, each with a fake GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMappings
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.cuda_memory.device_memory import DEVICE
from tests.unit.fake_gpu import SIZE, objects_of, runtime_that_gives_all_back


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """What the owner of the memory has."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
    assert objects_of(os.getpid()) == []


@pytest.fixture
def peer(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """What the process that maps it has."""
    with runtime_that_gives_all_back() as peer:
        yield peer
        assert peer.current_device() == 0


@pytest.fixture
def mappings(peer: FakeCuda) -> CudaMappings:
    return CudaMappings(peer)


@pytest.fixture
def allocation(cuda: FakeCuda) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    yield allocation
    allocation.free()
