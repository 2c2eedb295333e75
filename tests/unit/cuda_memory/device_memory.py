"""What the tests of this folder look at in device memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMapping, CudaMappings
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, LiveCounts
from tests.unit.fake_gpu import BYTES, SIZE

DEVICE = 1
FIELD = "regions[1]"
FLOATS = np.dtype(np.float32)
NOTHING = LiveCounts()


def mapping_of(allocation: CudaAllocation, mappings: CudaMappings) -> CudaMapping:
    return mappings.map(allocation.handle, allocation.byte_size, DEVICE, FIELD)


def whole(memory: CudaAllocation | CudaMapping) -> FakeDeviceArray:
    array = memory.array_at(0, BYTES, (memory.byte_size,), memory.byte_size, None)
    assert isinstance(array, FakeDeviceArray)
    return array


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


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
