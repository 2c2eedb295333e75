"""Device memory: allocated and kept by its owner; opened once by those who map it, seen by both sides, and closed."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, MachineError, RegionRefusedError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings, device_with
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.cuda_memory.conftest import DEVICE, FIELD, SIZE, mapping_of, reason_against, whole
from tests.unit.gpus import BLOCK_BYTES, NOTHING, collect_all, in_another_thread


def test_two_mappings_have_one_identity_if_they_are_of_one_allocation(
    gpu: CudaRuntime, allocation: CudaAllocation, mappings: CudaMappings
) -> None:
    other = CudaAllocation(gpu, SIZE, DEVICE)
    one, same = mapping_of(allocation, mappings), mapping_of(allocation, mappings)
    different = mapping_of(other, mappings)
    assert one.identity == same.identity != different.identity
    assert one.identity[0] < 0  # no file is on such a device
    different.close()
    collect_all(mappings.runtime)
    other.free()


def test_more_than_is_mapped_fails_the_check(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    with pytest.raises(RegionRefusedError, match=rf"regions\[1\] refused: it claims {SIZE + 1} bytes of .* {SIZE}$"):
        mapping_of(allocation, mappings).check(SIZE + 1, FIELD)


def test_a_closed_mapping_is_nothing_to_keep(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mapping_of(allocation, mappings)
    mapping.close()
    mapping.close()
    assert mapping.is_closed
    with pytest.raises(ClosedError, match="this region is closed"):
        mapping.keeper  # noqa: B018


def test_threads_that_map_at_once_open_once(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    threads = 4
    arrived = threading.Barrier(threads)
    opened = driver.count("cuIpcOpenMemHandle", 1)

    def map_it(_: int) -> CudaMapping:
        arrived.wait()
        return mapping_of(allocation, mappings)

    for _ in range(25):
        with ThreadPoolExecutor(threads) as pool:
            made = list(pool.map(map_it, range(threads)))
        assert len({mapping.address for mapping in made}) == 1
        made.clear()
        collect_all(peer)
        assert driver.live(1) == NOTHING
    assert driver.count("cuIpcOpenMemHandle", 1) - opened == 25


def test_threads_that_map_and_let_go_leave_nothing(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    def map_and_let_go(_: int) -> None:
        for _ in range(50):
            mapping = mappings.map(allocation.handle, SIZE, DEVICE, FIELD, None, allocation.event_handle)
            assert mapping.event
            mapping.close()
            peer.retired.collect()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(map_and_let_go, range(4)))
    collect_all(peer)
    assert driver.live(1) == NOTHING


# Two processes of the operating system, of which one may be killed


OWNER = f"""
import sys
import numpy as np
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

driver = FakeDriver.load()
cuda = driver.runtime()
allocation = CudaAllocation(cuda, {SIZE}, {DEVICE})
array = driver.memory(allocation.address, ({SIZE},), np.dtype(np.uint8))
print(allocation.handle.hex(), allocation.device_uuid, allocation.event_handle.hex(), flush=True)
for line in sys.stdin:
    index, value = map(int, line.split())
    cuda.synchronize_event(allocation.event)
    print(array[index], flush=True)
    array[index] = value
    print("written", flush=True)
allocation.free()
while cuda.retired.collect():
    pass
print(driver.violations(), driver.live().allocations, driver.live().events, flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that allocates memory, tells its handle, and then takes lines: an index, and what to write there."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def mapping_from(process: subprocess.Popen[str], mappings: CudaMappings) -> CudaMapping:
    handle, uuid, event = line_of(process).split()
    device = device_with(mappings.runtime, uuid, FIELD)
    return mappings.map(bytes.fromhex(handle), SIZE, device, FIELD, None, bytes.fromhex(event))


def test_what_one_process_writes_the_other_reads_when_it_is_there(
    driver: FakeDriver, owner: subprocess.Popen[str], mappings: CudaMappings
) -> None:
    mapping = mapping_from(owner, mappings)
    array, peer = whole(driver, mapping), mappings.runtime
    stream = peer.create_stream(DEVICE)
    driver.launch(stream, lambda: np.put(array, 3, 77), 1)
    with peer.on(DEVICE):
        peer.record(mapping.event, stream)
    assert owner.stdin is not None
    print(3, 99, file=owner.stdin, flush=True)
    assert line_of(owner) == "77"
    assert line_of(owner) == "written"
    assert array[3] == 99
    mapping.close()
    peer.destroy_stream(stream, DEVICE)
    collect_all(peer)
    owner.stdin.close()
    assert line_of(owner) == "[] 0 0"


def test_memory_of_a_killed_process_stays_while_it_is_mapped_and_is_refused_then(
    driver: FakeDriver, owner: subprocess.Popen[str], mappings: CudaMappings
) -> None:
    mapping = mapping_from(owner, mappings)
    handle = mapping.handle
    owner.kill()
    owner.wait()
    assert whole(driver, mapping).size == SIZE
    mapping.close()
    collect_all(mappings.runtime)
    assert "or is dead" in reason_against(mappings, handle)


# GPUs by their UUIDs, and the loading of CUDA


def seeing(uuids: list[str]) -> Any:
    """Return a runtime that sees these GPUs in this order."""
    return types.SimpleNamespace(device_count=lambda: len(uuids), device_uuid=uuids.__getitem__)


def test_a_device_is_found_by_its_uuid_whatever_its_number(gpu: CudaRuntime) -> None:
    other_way = seeing([gpu.device_uuid(1), gpu.device_uuid(0)])
    assert [device_with(other_way, gpu.device_uuid(device), FIELD) for device in (0, 1)] == [1, 0]
    assert [device_with(gpu, gpu.device_uuid(device), FIELD) for device in (0, 1)] == [0, 1]


@pytest.mark.parametrize("devices", [0, 1])
def test_a_device_that_is_not_seen_is_refused_and_the_message_says_how_many_are(gpu: CudaRuntime, devices: int) -> None:
    with pytest.raises(RegionRefusedError) as caught:
        device_with(seeing([gpu.device_uuid(0)][:devices]), gpu.device_uuid(1), FIELD)
    assert caught.value.field == FIELD
    assert f"it sees {devices}" in caught.value.reason
    assert "(MIG)" in caught.value.reason
    assert "see CUDA_VISIBLE_DEVICES, --gpus and the model's instance_group" in caught.value.reason


def test_cuda_is_loaded_when_it_is_needed_and_once(gpu: CudaRuntime) -> None:
    loaded: list[CudaRuntime] = []

    def load() -> CudaRuntime:
        loaded.append(gpu)
        return gpu

    access = CudaAccess(load)
    assert (access.collect(), access.has_retired, loaded) == (False, False, [])
    mappings = access.mappings
    assert access.mappings is mappings
    assert [access.runtime, mappings.runtime] == [gpu, gpu]
    assert len(loaded) == 1


def test_cuda_that_could_not_be_loaded_is_tried_again(gpu: CudaRuntime) -> None:
    outcomes: list[CudaRuntime | MachineError] = [MachineError("there is no GPU yet"), gpu]

    def load() -> CudaRuntime:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MachineError):
            raise outcome
        return outcome

    access = CudaAccess(load)
    with pytest.raises(MachineError, match="there is no GPU yet"):
        access.runtime  # noqa: B018
    assert access.runtime is gpu


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
