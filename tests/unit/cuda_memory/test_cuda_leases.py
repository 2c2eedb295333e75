"""While device memory is mapped: its owner sees that by a lease, and waits for what is done there by an event."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.conftest import DEVICE, FIELD, SIZE
from tests.unit.gpus import NOTHING, PATIENCE_S, collect_all


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


# Events


def mapped(allocation: CudaAllocation, mappings: CudaMappings, event: bytes = b"") -> CudaMapping:
    return mappings.map(allocation.handle, SIZE, DEVICE, FIELD, None, event or allocation.event_handle)


def test_what_a_model_records_its_client_waits_for(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, gpu: CudaRuntime, peer: CudaRuntime
) -> None:
    mapping = mapped(allocation, mappings)
    stream = peer.create_stream(DEVICE)
    finish = threading.Event()
    driver.launch(stream, lambda: finish.wait(PATIENCE_S), 1)
    assert gpu.is_event_done(allocation.event)
    with peer.on(DEVICE):
        peer.record(mapping.event, stream)
    assert not gpu.is_event_done(allocation.event)
    finish.set()
    gpu.synchronize_event(allocation.event)
    assert gpu.is_event_done(allocation.event)
    peer.destroy_stream(stream, DEVICE)


def test_what_an_event_stood_for_is_done_after_the_model_has_let_go(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, gpu: CudaRuntime, peer: CudaRuntime
) -> None:
    """A model that is unloaded destroys nothing that its client waits for: the event is the client's."""
    mapping = mapped(allocation, mappings)
    stream = peer.create_stream(DEVICE)
    finish = threading.Event()
    driver.launch(stream, lambda: finish.wait(PATIENCE_S), 1)
    with peer.on(DEVICE):
        peer.record(mapping.event, stream)
    mapping.close()
    del mapping
    peer.destroy_stream(stream, DEVICE)
    finish.set()
    collect_all(peer)
    assert gpu.is_event_done(allocation.event)


def test_two_uses_of_one_allocation_may_have_different_events(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, gpu: CudaRuntime, peer: CudaRuntime
) -> None:
    """A client lends two tensors of one allocation, each with an event of its own."""
    other = gpu.create_shared_event(DEVICE)
    one, two = mapped(allocation, mappings), mapped(allocation, mappings, gpu.export_event(other))
    assert (one.address, len({one.event, two.event})) == (two.address, 2)
    two.close()
    collect_all(peer)
    gpu.destroy_event(other, DEVICE)
    with peer.on(DEVICE):
        peer.record(one.event, 0)
    one.close()
    collect_all(peer)
    assert driver.live(1) == NOTHING


def test_a_mapping_without_an_event_has_none_though_another_has(
    allocation: CudaAllocation, mappings: CudaMappings
) -> None:
    mapped(allocation, mappings)
    assert mappings.map(allocation.handle, SIZE, DEVICE, FIELD).event == 0


def test_what_is_no_event_is_refused_and_the_memory_with_it(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    for handle in (bytes(HANDLE_LENGTH), allocation.handle):
        with pytest.raises(RegionRefusedError, match=r"^regions\[1\].event refused: opening another process' event"):
            mapped(allocation, mappings, handle)
    collect_all(peer)
    assert driver.live(1) == NOTHING
