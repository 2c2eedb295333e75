"""What the tests of this folder look at in device memory."""

from __future__ import annotations

import gc

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import BLOCK_BYTES

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
