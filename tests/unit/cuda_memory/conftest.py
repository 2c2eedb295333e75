"""The owner of device memory, the process that maps it, and what tests look at there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import BLOCK_BYTES, collect_all

DEVICE = 1
FIELD = "regions[1]"
SIZE = BLOCK_BYTES


def mapping_of(allocation: CudaAllocation, mappings: CudaMappings, device: int = DEVICE) -> CudaMapping:
    return mappings.map(allocation.handle, allocation.byte_size, device, FIELD)


def whole(driver: FakeDriver, memory: CudaAllocation | CudaMapping) -> npt.NDArray[np.uint8]:
    """Return the bytes on the GPU, which nobody else on the host can reach."""
    return driver.memory(memory.address, (memory.byte_size,), np.dtype(np.uint8))


def reason_against(mappings: CudaMappings, handle: bytes, byte_size: int = SIZE, device: int = DEVICE) -> str:
    """Return why mapping is refused."""
    with pytest.raises(RegionRefusedError) as caught:
        mappings.map(handle, byte_size, device, FIELD)
    assert caught.value.field == FIELD
    assert str(caught.value).startswith(f"{FIELD} refused: ")
    assert handle.hex() not in str(caught.value) or not handle
    reason = caught.value.reason
    del caught  # it has the frames, and what they hold
    gc.collect()
    return reason


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
