"""Device memory that is registered by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.errors import CallerError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from tests.unit.fake_gpu import BLOCK, DRIVER, MODEL, SIZE, content, left_of, wait_until
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, register, times


def test_registered_memory_is_the_clients(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    here = DRIVER.memory(allocation.address, (SIZE,), np.uint8)
    here[:] = 0
    content(manager.get_memory_info("mine", 100, 10).memory)[:] = 42
    assert here[99:111].tolist() == [0, *[42] * 10, 0]


def test_a_part_of_registered_memory_has_its_attributes(
    manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    register(manager, allocation)
    attributes = manager.get_memory_info("mine", 100, 10).attributes
    assert attributes == BufferAttributes(MemoryType.GPU, DEVICE, 10, allocation.handle)


def test_the_status_tells_no_handle(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    assert manager.status() == [RegionStatus("mine", "", 0, SIZE)]


@pytest.mark.parametrize(("offset", "byte_size"), [(0, SIZE + 1), (SIZE, 1), (-1, 1), (1, 2**63 - 1)])
def test_a_part_that_is_not_in_the_memory_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, offset: int, byte_size: int
) -> None:
    register(manager, allocation)
    with pytest.raises(CallerError, match=f"of region 'mine' were asked for; expected 0 to {SIZE}"):
        manager.get_memory_info("mine", offset, byte_size)


def test_only_as_much_as_was_registered_can_be_reached(
    manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    register(manager, allocation, byte_size=SIZE - 1)
    with pytest.raises(CallerError, match=f"expected 0 to {SIZE - 1}"):
        manager.get_memory_info("mine", 0, SIZE)


def test_two_names_of_one_allocation_share_one_mapping(
    manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    assert register(manager, allocation, "first") is register(manager, allocation, "second")
    assert (times("cuIpcOpenMemHandle"), manager.mapped_bytes) == (1, BLOCK)
    manager.unregister("first")
    assert left_of(MODEL).opened == 1
    manager.unregister("second")
    assert left_of(MODEL) == NOTHING


def test_a_name_is_given_once_whatever_the_kind(
    manager: SharedMemoryManager, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    manager.register_system_shared_memory("mine", region.segment.key, 0, 100)
    with pytest.raises(CallerError, match="region 'mine' is registered already; unregister it first"):
        register(manager, allocation)


def test_memory_in_use_is_unmapped_when_its_use_ends(
    cuda: CudaRuntime, manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    use = register(manager, allocation)
    manager.unregister("mine")
    assert left_of(MODEL).opened == 1
    del use
    wait_until(lambda: not cuda.retired.collect())
    assert left_of(MODEL) == NOTHING


def test_arrays_outlive_their_name(cuda: CudaRuntime, manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    memory = manager.get_memory_info("mine", 0, SIZE).memory
    manager.unregister_all()
    content(memory)[:] = 42
    assert left_of(MODEL).opened == 1
    del memory
    wait_until(lambda: not cuda.retired.collect())
    assert left_of(MODEL) == NOTHING


def test_unused_memory_makes_room(client: CudaRuntime, cuda: CudaRuntime, allocation: CudaAllocation) -> None:
    other = CudaAllocation(client, SIZE, DEVICE)
    manager = SharedMemoryManager(max_mapped_bytes=BLOCK, cuda=CudaAccess(lambda: cuda))
    register(manager, allocation, "old")
    register(manager, other, "new")
    assert [status.name for status in manager.status()] == ["new"]
    wait_until(lambda: not cuda.retired.collect())
    assert left_of(MODEL).opened == 1
    manager.unregister_all()
