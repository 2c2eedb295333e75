"""Device memory that is mapped: opened once, seen by both sides, and closed when nobody keeps it any more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, SIZE, mapping_of, whole
from tests.unit.gpus import NOTHING, collect_all


def test_both_sides_see_what_the_other_writes(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings
) -> None:
    mapping = mapping_of(allocation, mappings)
    here, there = whole(driver, allocation), whole(driver, mapping)
    here[0] = 1
    there[SIZE - 1] = 2
    assert (there[0], here[SIZE - 1]) == (1, 2)


def test_a_mapping_knows_what_it_is(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mapping_of(allocation, mappings)
    assert (mapping.handle, mapping.byte_size, mapping.device, mapping.event) == (allocation.handle, SIZE, DEVICE, 0)
    assert not mapping.is_closed
    assert not mapping.is_unlinked


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


@pytest.mark.parametrize("byte_size", [0, 1, SIZE])
def test_what_is_mapped_passes_its_check(allocation: CudaAllocation, mappings: CudaMappings, byte_size: int) -> None:
    mapping_of(allocation, mappings).check(byte_size, FIELD)


def test_more_than_is_mapped_fails_the_check(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    with pytest.raises(RegionRefusedError, match=rf"regions\[1\] refused: it claims {SIZE + 1} bytes of .* {SIZE}$"):
        mapping_of(allocation, mappings).check(SIZE + 1, FIELD)


def test_memory_is_opened_once_however_often_it_is_mapped(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    opened, closed = driver.count("cuIpcOpenMemHandle", 1), driver.count("cuIpcCloseMemHandle", 1)
    one, other = mapping_of(allocation, mappings), mapping_of(allocation, mappings)
    assert one.address == other.address
    one.close()
    collect_all(peer)
    assert driver.live(1).opened == 1
    other.close()
    collect_all(peer)
    assert driver.live(1) == NOTHING
    assert (driver.count("cuIpcOpenMemHandle", 1) - opened, driver.count("cuIpcCloseMemHandle", 1) - closed) == (1, 1)


def test_memory_that_was_closed_is_opened_again(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    opened = driver.count("cuIpcOpenMemHandle", 1)
    for _ in range(2):
        mapping_of(allocation, mappings).close()
        collect_all(peer)
        assert driver.live(1) == NOTHING
    assert driver.count("cuIpcOpenMemHandle", 1) - opened == 2


def test_memory_is_closed_after_the_last_one_that_keeps_it(
    driver: FakeDriver, allocation: CudaAllocation, mappings: CudaMappings, peer: CudaRuntime
) -> None:
    mapping = mapping_of(allocation, mappings)
    keeper = mapping.keeper
    mapping.close()
    del mapping
    collect_all(peer)
    assert driver.live(1).opened == 1
    del keeper
    collect_all(peer)
    assert driver.live(1) == NOTHING


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
