"""The owner of device memory, and the process that maps it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from tests.unit.cuda_memory.device_memory import DEVICE, SIZE
from tests.unit.gpus import collect_all


@pytest.fixture
def mappings(peer: CudaRuntime) -> CudaMappings:
    return CudaMappings(peer)


@pytest.fixture
def allocation(gpu: CudaRuntime, peer: CudaRuntime) -> Iterator[CudaAllocation]:
    """Memory that is freed after everybody has unmapped it."""
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    yield allocation
    collect_all(peer)
    allocation.free()
