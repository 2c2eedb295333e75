"""The lease by which the owner sees that its device memory is mapped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, SIZE
from tests.unit.gpus import NOTHING, collect_all


@pytest.fixture
def fence() -> Iterator[int]:
    """A region, open, on which users of the memory show themselves to its owner."""
    region = ManagedRegion.create(1)
    yield region.segment.fileno()
    region.segment.unlink()
    region.close()


def leased(allocation: CudaAllocation, mappings: CudaMappings, fence: int) -> CudaMapping:
    return mappings.map(allocation.handle, SIZE, DEVICE, FIELD, use(fence), allocation.event_handle)


def test_a_lease_is_held_until_the_memory_is_unmapped(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    keeper = mapping.keeper
    mapping.close()
    collect_all(peer)
    assert has_users(fence)
    del keeper
    assert has_users(fence)
    collect_all(peer)
    assert (driver.live(1), has_users(fence)) == (NOTHING, False)


def test_each_use_of_memory_that_is_mapped_already_has_a_lease_of_its_own(
    allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    first = leased(allocation, mappings, fence)
    second = leased(allocation, mappings, fence)
    first.close()
    collect_all(peer)
    assert has_users(fence)
    second.close()
    collect_all(peer)
    assert not has_users(fence)


def test_a_lease_is_held_while_the_gpu_still_works(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    """Whose stream that is, nobody asks: it may be any of the device."""
    mapping = leased(allocation, mappings, fence)
    stream = peer.create_stream(DEVICE)
    finish = threading.Event()
    driver.launch(stream, lambda: finish.wait(20), 1)
    mapping.close()
    del mapping
    for _ in range(3):
        assert peer.retired.collect()
    assert has_users(fence)
    finish.set()
    collect_all(peer)
    assert not has_users(fence)
    peer.destroy_stream(stream, DEVICE)


def test_work_that_comes_later_keeps_no_lease(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    mapping.close()
    del mapping
    stream = peer.create_stream(DEVICE)
    finish = threading.Event()
    while not peer.retired._waiting:
        peer.retired.collect()
        if not has_users(fence):
            break
    driver.launch(stream, lambda: finish.wait(20), 1)
    collect_all(peer)
    assert not has_users(fence)
    finish.set()
    peer.destroy_stream(stream, DEVICE)


def test_memory_whose_device_was_waited_for_is_unmapped_at_once(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    peer.synchronize_device(DEVICE)
    mapping.close_idle()
    assert has_users(fence)
    recorded = driver.count("cuCtxRecordEvent", 1)
    assert not peer.retired.collect()
    assert (has_users(fence), driver.count("cuCtxRecordEvent", 1)) == (False, recorded)


def test_memory_that_somebody_keeps_is_not_idle(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    keeper = mapping.keeper
    mapping.close_idle()
    mapping.close_idle()
    assert not peer.retired.collect()
    recorded = driver.count("cuCtxRecordEvent", 1)
    del keeper
    collect_all(peer)
    assert (has_users(fence), driver.count("cuCtxRecordEvent", 1)) == (False, recorded + 1)


def test_a_lease_stays_while_cuda_does_not_unmap_the_memory(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    region = ManagedRegion.create(1)
    fence = region.segment.fileno()
    lease = use(fence)
    mapping = mappings.map(allocation.handle, SIZE, DEVICE, FIELD, lease, allocation.event_handle)
    driver.fail_next("cuIpcCloseMemHandle", "CUDA_ERROR_MAP_FAILED", process=1)
    mapping.close()
    collect_all(peer)
    assert has_users(fence)
    assert driver.live(1).opened == 1
    again = leased(allocation, mappings, fence)
    again.close()
    collect_all(peer)
    assert has_users(fence), "that of the first is held still"
    peer.close(mapping.address, DEVICE)
    lease.give_back()
    region.segment.unlink()
    region.close()
