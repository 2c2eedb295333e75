"""Device memory that cannot be registered or claimed; errors tell no handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import CallerError, MachineError, RegionRefusedError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import has_borrowers, has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.spans import Table
from tests.unit.claims_of import claim_of_allocation, slot_of
from tests.unit.fake_gpu import BLOCK, DRIVER, MODEL, left_of, wait_until
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, Model, refusal, register

FIELD = "regions[1]"
TOO_SHORT, TOO_LONG = b"\1" * (HANDLE_LENGTH - 1), b"\1" * (HANDLE_LENGTH + 1)


@pytest.mark.parametrize("byte_size", [-1, 2**63])
def test_a_size_that_no_memory_has_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, byte_size: int
) -> None:
    with pytest.raises(CallerError, match="of region 'mine' were asked for; expected 0 to"):
        manager.register_cuda_shared_memory("mine", allocation.handle, byte_size, DEVICE)


def handle_of(allocation: CudaAllocation) -> bytes:
    return allocation.handle


def free(allocation: CudaAllocation) -> None:
    allocation.free()
    wait_until(lambda: not allocation.runtime.retired.collect())


def handle_of_freed(allocation: CudaAllocation) -> bytes:
    free(allocation)
    return allocation.handle


def no_handle_of_cuda(allocation: CudaAllocation) -> bytes:
    return bytes(HANDLE_LENGTH)


@pytest.mark.parametrize(
    ("offer", "byte_size", "device", "words"),
    [
        (handle_of, BLOCK + 1, DEVICE, [f"it claims {BLOCK + 1} bytes of an allocation of {BLOCK}"]),
        (handle_of, BLOCK, 0, ["it is on GPU 1, and not on GPU 0, as it says"]),
        (handle_of, BLOCK, 2, ["CUDA_ERROR_INVALID_DEVICE", "there is no such GPU here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of, BLOCK, -1, ["CUDA_ERROR_INVALID_DEVICE", "there is no such GPU here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of_freed, BLOCK, DEVICE, ["its owner has freed the memory"]),
        (no_handle_of_cuda, BLOCK, DEVICE, ["CUDA_ERROR_INVALID_VALUE", "the handle is none of this machine's GPUs"]),
    ],
    ids=["more than was allocated", "another GPU", "no such GPU", "a GPU below zero", "freed", "no handle"],
)
def test_memory_that_cannot_be_registered_is_refused_with_what_is_the_matter(
    cuda: CudaRuntime,
    manager: SharedMemoryManager,
    allocation: CudaAllocation,
    offer: Callable[[CudaAllocation], bytes],
    byte_size: int,
    device: int,
    words: list[str],
) -> None:
    handle = offer(allocation)
    error = refusal(lambda: manager.register_cuda_shared_memory("mine", handle, byte_size, device), handle)
    assert isinstance(error, RegionRefusedError)
    assert error.field == "region 'mine'"
    assert [word for word in words if word not in error.reason] == []
    wait_until(lambda: not cuda.retired.collect())
    assert (left_of(MODEL), manager.status(), manager.mapped_bytes) == (NOTHING, [], 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": TOO_SHORT}, [f"its handle has {len(TOO_SHORT)} bytes; expected {HANDLE_LENGTH}"]),
        ({"handle": bytes(HANDLE_LENGTH)}, ["CUDA_ERROR_INVALID_VALUE", "the handle is none of this machine's GPUs"]),
        ({"byte_size": BLOCK + 1}, [f"it claims {BLOCK + 1} bytes of an allocation of {BLOCK}"]),
        ({"device_uuid": "0" * 32}, ["that this model does not see (it sees 2)", "--gpus", "instance_group"]),
    ],
    ids=["a handle of another length", "no handle", "more than was allocated", "a GPU not seen"],
)
@pytest.mark.parametrize("fence", [0, None], ids=["fenced", "unfenced"])
def test_memory_that_cannot_be_claimed_is_refused_and_the_client_may_free_it(
    model: Model,
    region: ManagedRegion,
    allocation: CudaAllocation,
    changes: dict[str, Any],
    words: list[str],
    fence: int | None,
) -> None:
    claim = claim_of_allocation(allocation, fence=fence, **changes)
    error = refusal(lambda: model.resolve(claim), claim.handle, allocation.handle, region.header.token)
    assert isinstance(error, RegionRefusedError)
    assert error.field == FIELD
    assert region.segment.key not in str(error)
    assert [word for word in words if word not in error.reason] == []
    model.unmap()
    assert left_of(MODEL) == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_is_on_another_gpu_than_is_claimed_is_refused(
    client: CudaRuntime, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    claim = claim_of_allocation(allocation, device_uuid=client.device_uuid(1 - DEVICE))
    error = refusal(lambda: model.resolve(claim), allocation.handle)
    assert "it is on GPU 1, and not on GPU 0, as it says" in str(error)
    assert not has_users(region.segment.fileno())


def test_memory_that_no_slot_fences_is_refused_where_the_model_takes_none(
    cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(lambda: cuda, region, foreign_regions=False)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation, fence=None)), allocation.handle)
    assert str(error) == f"{FIELD} refused: this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)"
    assert DRIVER.count("cuIpcOpenMemHandle", MODEL) == 0
    assert model.resolve(claim_of_allocation(allocation)).memory.byte_size == BLOCK
    model.resolver.close()


def test_too_much_memory_is_the_machines_fault(
    cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=BLOCK - 1, cuda=CudaAccess(lambda: cuda))
    error = refusal(lambda: register(manager, allocation), allocation.handle)
    assert "SHM_MAX_MAPPED_BYTES" in str(error)
    wait_until(lambda: not cuda.retired.collect())
    assert (left_of(MODEL), manager.status()) == (NOTHING, [])


@pytest.mark.parametrize("changes", [{"is_for_one_request": True}, {"fence": None}], ids=["lent", "not fenced"])
def test_memory_for_one_request_that_is_too_much_is_unmapped_before_that_is_told(
    cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation, changes: dict[str, Any]
) -> None:
    model = Model(lambda: cuda, region, BLOCK - 1)
    slot = slot_of(model.resolver, region)
    said = Table({}, {}, (claim_of_allocation(allocation, **changes),))
    with pytest.raises(MachineError, match="SHM_MAX_MAPPED_BYTES") as caught:  # which keeps the frames
        model.resolver.open_further(said, slot)
    assert left_of(MODEL) == NOTHING
    assert not has_borrowers(region.segment.fileno(), layout.record_offset(0, region.header.record_byte_size))
    del caught, slot
    model.resolver.close()
