"""Device memory that is allocated, is kept, and is freed after the last one that keeps it."""

from __future__ import annotations

import pytest

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.cuda_memory.conftest import DEVICE, SIZE, mapping_of
from tests.unit.gpus import BLOCK_BYTES, NOTHING, collect_all, in_another_thread


def test_an_allocation_knows_how_others_find_it(gpu: CudaRuntime, allocation: CudaAllocation) -> None:
    assert (allocation.byte_size, allocation.device) == (SIZE, DEVICE)
    assert allocation.device_uuid == gpu.device_uuid(DEVICE)
    with gpu.on(DEVICE):
        assert allocation.handle == gpu.export(allocation.address)
        assert allocation.event_handle == gpu.export_event(allocation.event)


def test_what_others_allocate_is_not_in_what_opens_our_memory(
    driver: FakeDriver, gpu: CudaRuntime, mappings: CudaMappings
) -> None:
    """Small allocations share a block, all of which an IPC handle opens."""
    neighbours = [driver.tensor([1], device=DEVICE)]
    allocation = CudaAllocation(gpu, 1000, DEVICE)
    neighbours.append(driver.tensor([2], device=DEVICE))
    opened = mapping_of(allocation, mappings)
    assert mappings.runtime.extent(opened.address, DEVICE) == (opened.address, allocation.byte_size)
    assert neighbours[0].address // BLOCK_BYTES == neighbours[1].address // BLOCK_BYTES
    assert neighbours[0].address // BLOCK_BYTES != allocation.address // BLOCK_BYTES
    opened.close()
    collect_all(mappings.runtime)


def test_an_allocation_is_freed_once(driver: FakeDriver, gpu: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    freed = driver.count("cuMemFree")
    allocation.free()
    allocation.free()
    collect_all(gpu)
    assert (driver.live(), driver.count("cuMemFree") - freed) == (NOTHING, 1)


def test_memory_is_freed_after_the_last_one_that_keeps_it(driver: FakeDriver, gpu: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    keeper = allocation.keeper
    allocation.free()
    collect_all(gpu)
    assert driver.live().allocations == 1
    del keeper
    collect_all(gpu)
    assert driver.live() == NOTHING


def test_memory_is_freed_whichever_thread_drops_it_last(driver: FakeDriver, gpu: CudaRuntime) -> None:
    held = [CudaAllocation(gpu, SIZE, DEVICE)]
    in_another_thread(held.clear)
    in_another_thread(lambda: collect_all(gpu))
    assert driver.live() == NOTHING


def test_memory_that_cannot_be_freed_disturbs_nobody(driver: FakeDriver, gpu: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    address = allocation.address
    allocation.free()
    driver.fail_next("cuMemFree", "CUDA_ERROR_UNKNOWN")
    collect_all(gpu)
    assert driver.live().allocations == 1
    gpu.free(address, DEVICE)


def test_memory_is_freed_even_if_its_event_cannot_be_destroyed(
    gpu: CudaRuntime, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    kept, destroy = allocation.event, gpu.destroy_event

    def refuse(event: int, device: int) -> None:
        if event == kept:
            raise CudaError("destroying an event", "CUDA_ERROR_UNKNOWN")
        destroy(event, device)

    monkeypatch.setattr(gpu, "destroy_event", refuse)
    allocation.free()
    collect_all(gpu)
    assert driver.live() == LiveCounts(events=1)
    destroy(kept, DEVICE)


def test_freed_memory_is_nothing_to_keep(gpu: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    allocation.free()
    with pytest.raises(ClosedError, match="this device memory is closed"):
        allocation.keeper  # noqa: B018
