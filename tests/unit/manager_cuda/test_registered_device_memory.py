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
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, refusal, register, times


def test_registered_memory_is_the_clients(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    here = DRIVER.memory(allocation.address, (SIZE,), np.uint8)
    here[:] = 0
    part = manager.get_memory_info("mine", 100, 10)
    content(part.memory)[:] = 42
    assert here[99:111].tolist() == [0, *[42] * 10, 0]
    assert part.attributes == BufferAttributes(MemoryType.GPU, DEVICE, 10, allocation.handle)
    assert manager.status() == [RegionStatus("mine", "", 0, SIZE)]


@pytest.mark.parametrize(
    ("byte_size", "device", "reason"),
    [
        (BLOCK + 1, DEVICE, f"it claims {BLOCK + 1} bytes of an allocation of {BLOCK}"),
        (BLOCK, 0, "it is on GPU 1, and not on GPU 0, as it says"),
    ],
)
def test_memory_that_is_not_as_it_is_said_is_not_registered(
    cuda: CudaRuntime,
    manager: SharedMemoryManager,
    allocation: CudaAllocation,
    byte_size: int,
    device: int,
    reason: str,
) -> None:
    handle = allocation.handle
    error = refusal(lambda: manager.register_cuda_shared_memory("mine", handle, byte_size, device), handle)
    assert str(error) == f"region 'mine' refused: {reason}"
    wait_until(lambda: not cuda.retired.collect())
    assert (left_of(MODEL), manager.status(), manager.mapped_bytes) == (NOTHING, [], 0)


@pytest.mark.parametrize(("offset", "byte_size"), [(0, SIZE + 1), (SIZE, 1), (-1, 1), (1, 2**63 - 1)])
def test_a_part_that_is_not_in_the_memory_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, offset: int, byte_size: int
) -> None:
    register(manager, allocation)
    with pytest.raises(CallerError, match=f"of region 'mine' were asked for; expected 0 to {SIZE}"):
        manager.get_memory_info("mine", offset, byte_size)


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
