"""The owner's event of an allocation: those who have the memory mapped open it, and record what they do there."""

from __future__ import annotations

import threading

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, SIZE
from tests.unit.gpus import NOTHING, PATIENCE_S, collect_all


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


@pytest.mark.parametrize("length", [1, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1])
def test_the_handle_of_an_event_of_another_length_is_refused(
    allocation: CudaAllocation, mappings: CudaMappings, length: int
) -> None:
    with pytest.raises(RegionRefusedError, match=rf"\.event refused: its handle has {length} bytes; expected 64"):
        mapped(allocation, mappings, b"\1" * length)


def test_what_is_no_event_is_refused_and_the_memory_with_it(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    for handle in (bytes(HANDLE_LENGTH), allocation.handle):
        with pytest.raises(RegionRefusedError, match=r"^regions\[1\].event refused: opening another process' event"):
            mapped(allocation, mappings, handle)
    collect_all(peer)
    assert driver.live(1) == NOTHING


def test_an_event_whose_owner_has_destroyed_it_is_refused(
    allocation: CudaAllocation, mappings: CudaMappings, gpu: CudaRuntime
) -> None:
    event = gpu.create_shared_event(DEVICE)
    handle = gpu.export_event(event)
    gpu.destroy_event(event, DEVICE)
    with pytest.raises(RegionRefusedError, match="CUDA_ERROR_INVALID_HANDLE"):
        mapped(allocation, mappings, handle)
