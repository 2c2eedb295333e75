"""Device memory and those who map it: leases and events that its owner sees, and what is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.conftest import DEVICE, FIELD, SIZE, mapping_of, reason_against
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


@pytest.mark.parametrize("length", [0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1])
def test_a_handle_of_another_length_is_refused(driver: FakeDriver, mappings: CudaMappings, length: int) -> None:
    opened = driver.count("cuIpcOpenMemHandle", 1)
    assert reason_against(mappings, b"\1" * length) == f"its handle has {length} bytes; expected {HANDLE_LENGTH}"
    assert driver.count("cuIpcOpenMemHandle", 1) == opened


def test_less_than_was_allocated_may_be_claimed(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mappings.map(allocation.handle, SIZE - 1, DEVICE, FIELD)
    assert mapping.byte_size == SIZE  # another claim may be of more


@pytest.mark.parametrize("what", ["more than was allocated", "no event", "interrupted"])
def test_what_is_refused_is_unmapped_before_that_is_told(
    driver: FakeDriver,
    allocation: CudaAllocation,
    mappings: CudaMappings,
    peer: CudaRuntime,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    region = ManagedRegion.create(100)
    fd = region.segment.fileno()
    if what == "interrupted":
        monkeypatch.setattr(peer, "open_event", interrupted)
    byte_size = SIZE + 1 if what == "more than was allocated" else SIZE
    event = bytes(HANDLE_LENGTH) if what == "no event" else allocation.event_handle
    with pytest.raises((RegionRefusedError, KeyboardInterrupt)) as caught:  # which keeps the frames
        mappings.map(allocation.handle, byte_size, DEVICE, FIELD, use(fd), event)
    assert driver.live(1) == NOTHING
    assert not has_users(fd)
    del caught
    region.segment.unlink()
    region.close()


def interrupted(*_: object) -> int:
    raise KeyboardInterrupt


def test_what_lies_before_the_memory_in_its_allocation_does_not_count(
    allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = peer.extent

    def of_a_larger_block(address: int, device: int) -> tuple[int, int]:
        begin, byte_size = extent(address, device)
        return begin - 512, byte_size + 512

    monkeypatch.setattr(peer, "extent", of_a_larger_block)
    mapping_of(allocation, mappings).close()
    assert reason_against(mappings, allocation.handle, SIZE + 1).endswith(f"an allocation of {SIZE}")


# Each cause has a text of its own, which says what to do.


def test_freed_memory_is_refused(gpu: CudaRuntime, mappings: CudaMappings) -> None:
    allocation = CudaAllocation(gpu, SIZE, DEVICE)
    allocation.free()
    collect_all(gpu)
    reason = reason_against(mappings, allocation.handle)
    assert "CUDA_ERROR_INVALID_HANDLE" in reason
    assert "its owner has freed the memory" in reason
    assert "--ipc=host --pid=host" in reason


def test_memory_of_the_same_process_is_refused(allocation: CudaAllocation, gpu: CudaRuntime) -> None:
    reason = reason_against(CudaMappings(gpu), allocation.handle)
    assert "CUDA_ERROR_INVALID_CONTEXT" in reason
    assert "the handle was exported by this very process" in reason


def test_memory_of_a_process_that_only_seems_to_be_this_one_is_refused(
    driver: FakeDriver, gpu: CudaRuntime, mappings: CudaMappings
) -> None:
    """In another PID namespace a process may have the same id: CUDA takes it for itself."""
    driver.namespace(0, "a container", 7)
    driver.namespace(1, "another container", 7)
    try:
        allocation = CudaAllocation(gpu, SIZE, DEVICE)
        reason = reason_against(mappings, allocation.handle)
    finally:
        driver.namespace(0, "", 0)
        driver.namespace(1, "", 0)
    assert "CUDA_ERROR_INVALID_CONTEXT" in reason
    assert "or by one of another PID namespace that has the same process id there" in reason
    assert "--pid=host --ipc=host" in reason


def test_memory_on_a_device_that_there_is_not_is_refused(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    reason = reason_against(mappings, allocation.handle, device=2)
    assert "CUDA_ERROR_INVALID_DEVICE" in reason
    assert "see CUDA_VISIBLE_DEVICES and --gpus" in reason


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("CUDA_ERROR_NOT_SUPPORTED", "use memory of the host"),
        (
            "CUDA_ERROR_MAP_FAILED",
            "on a GPU that this process cannot reach; with MIG, both processes must use the same",
        ),
        ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "give model and client the same GPU"),
        ("CUDA_ERROR_NO_DEVICE", "see nvidia-smi"),
        ("CUDA_ERROR_NOT_PERMITTED", "the container's security options"),
    ],
)
def test_what_cuda_refuses_is_told_with_a_remedy(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, name: str, remedy: str
) -> None:
    driver.fail_next("cuIpcOpenMemHandle", name, process=1)
    reason = reason_against(mappings, allocation.handle)
    assert name in reason
    assert remedy in reason


@pytest.mark.parametrize("function", ["cuCtxPushCurrent", "cuIpcOpenMemHandle", "cuMemGetAddressRange"])
def test_what_was_refused_leaves_nothing_open_and_may_be_tried_again(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime, function: str
) -> None:
    mapping_of(allocation, mappings).close()
    collect_all(peer)
    driver.fail_next(function, "CUDA_ERROR_UNKNOWN", process=1)
    assert "CUDA_ERROR_UNKNOWN: see CUresult in CUDA's documentation" in reason_against(mappings, allocation.handle)
    gc.collect()
    assert driver.live(1) == NOTHING
    assert mapping_of(allocation, mappings).byte_size == SIZE
