"""Device memory that is allocated, has arrays, and is freed after the last of them."""

from __future__ import annotations

import gc

import pytest

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray
from tests.unit.cuda_memory.device_memory import DEVICE, FLOATS, NOTHING, times, whole
from tests.unit.fake_gpu import BYTES, SIZE, fails_by, in_another_thread


def test_an_allocation_knows_how_others_find_it(cuda: FakeCuda, allocation: CudaAllocation) -> None:
    assert (allocation.byte_size, allocation.device) == (SIZE, DEVICE)
    assert allocation.handle == cuda.export(allocation.address)
    assert allocation.device_uuid == cuda.device_uuid(DEVICE)


def test_arrays_lie_where_they_are_asked_for(allocation: CudaAllocation) -> None:
    array = allocation.array_at(100, FLOATS, (2, 3), 24, None)
    assert isinstance(array, FakeDeviceArray)
    assert (array.address - allocation.address, array.shape, array.dtype, array.device) == (100, (2, 3), FLOATS, DEVICE)
    assert array.is_contiguous


def test_an_array_that_needs_more_than_its_bytes_is_not_made(allocation: CudaAllocation) -> None:
    assert allocation.array_at(0, FLOATS, (2, 3), 23, None) is None
    assert allocation.array_at(0, FLOATS, (2**40, 2**40), SIZE, None) is None


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("allocate", "cudaErrorMemoryAllocation"),
        ("export", "cudaErrorNotSupported"),
        ("device_uuid", "cudaErrorInvalidDevice"),
    ],
)
def test_an_allocation_that_fails_leaves_nothing(cuda: FakeCuda, method: str, name: str) -> None:
    cuda.fail_next(method, name)
    with fails_by(name):
        CudaAllocation(cuda, SIZE, DEVICE)
    gc.collect()  # the error has had the frames, and what they hold
    assert cuda.live == NOTHING


def test_an_allocation_is_freed_once(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    allocation.free()
    assert (cuda.live, times(cuda, "free")) == (NOTHING, 1)


def test_memory_is_freed_after_the_last_array(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    view = whole(allocation)[10:20]
    allocation.free()
    assert view.get().size == 10
    assert cuda.live.allocations == 1
    del view
    assert cuda.live == NOTHING


def test_memory_is_freed_when_its_allocation_is_forgotten(cuda: FakeCuda) -> None:
    CudaAllocation(cuda, SIZE, DEVICE)
    assert (cuda.live, times(cuda, "free")) == (NOTHING, 1)


def test_memory_is_freed_by_whichever_thread_drops_it_last_and_on_its_own_device(cuda: FakeCuda) -> None:
    held = [CudaAllocation(cuda, SIZE, DEVICE)]
    del cuda.log[:]
    in_another_thread(held.clear)
    assert [name for name, _ in cuda.log] == ["set_device", "free", "set_device"]
    assert [detail for name, detail in cuda.log if name == "set_device"] == [DEVICE, 0]


def test_memory_that_cannot_be_freed_disturbs_nobody(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    cuda.fail_next("free", "cudaErrorIllegalAddress")
    allocation.free()
    cuda.free(allocation.address)  # it is still there to be freed


def test_freed_memory_makes_no_arrays(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    with pytest.raises(ClosedError, match="this device memory is closed"):
        allocation.array_at(0, BYTES, (1,), 1)


def test_memory_on_a_gpu_that_there_is_not_is_not_allocated(cuda: FakeCuda) -> None:
    with fails_by("cudaErrorInvalidDevice"):
        CudaAllocation(cuda, SIZE, 2)
