"""Device memory that cannot be registered or claimed; errors tell no handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.errors import CallerError, RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import SharedMemoryManager
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.claims_of import claim_of_allocation
from tests.unit.fake_gpu import SIZE
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, Model, refusal, register

FIELD = "regions[1]"
TOO_SHORT, TOO_LONG = b"\1" * (HANDLE_LENGTH - 1), b"\1" * (HANDLE_LENGTH + 1)


@pytest.mark.parametrize("handle", [b"", TOO_SHORT, TOO_LONG], ids=len)
def test_a_handle_of_another_length_is_refused(cuda: FakeCuda, manager: SharedMemoryManager, handle: bytes) -> None:
    error = refusal(lambda: manager.register_cuda_shared_memory("mine", handle, SIZE, DEVICE))
    assert str(error) == f"region 'mine' refused: its handle has {len(handle)} bytes; expected {HANDLE_LENGTH}"
    assert (cuda.log, manager.status()) == ([], [])


@pytest.mark.parametrize("byte_size", [-1, 2**63])
def test_a_size_that_no_memory_has_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, byte_size: int
) -> None:
    with pytest.raises(CallerError, match="of region 'mine' were asked for; expected 0 to"):
        manager.register_cuda_shared_memory("mine", allocation.handle, byte_size, DEVICE)


def handle_of(allocation: CudaAllocation) -> bytes:
    return allocation.handle


def handle_of_freed(allocation: CudaAllocation) -> bytes:
    allocation.free()
    return allocation.handle


def no_handle_of_cuda(allocation: CudaAllocation) -> bytes:
    return bytes(HANDLE_LENGTH)


@pytest.mark.parametrize(
    ("offer", "byte_size", "device", "words"),
    [
        (handle_of, SIZE + 1, DEVICE, [f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"]),
        (handle_of, SIZE, 0, ["cudaErrorMapBufferObjectFailed", "this process cannot reach", "use the same instance"]),
        (handle_of, SIZE, 2, ["cudaErrorInvalidDevice", "there is no such device here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of, SIZE, -1, ["cudaErrorInvalidDevice", "there is no such device here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of_freed, SIZE, DEVICE, ["cudaErrorInvalidResourceHandle", "its owner has freed the memory", "--ipc"]),
        (no_handle_of_cuda, SIZE, DEVICE, ["cudaErrorInvalidValue", "the handle is none of this machine's GPUs"]),
    ],
    ids=["more than was allocated", "another GPU", "no such GPU", "a GPU below zero", "freed", "no handle"],
)
def test_memory_that_cannot_be_registered_is_refused_with_what_is_the_matter(
    cuda: FakeCuda,
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
    assert (cuda.live, manager.status(), manager.mapped_bytes) == (NOTHING, [], 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": TOO_SHORT}, [f"its handle has {len(TOO_SHORT)} bytes; expected {HANDLE_LENGTH}"]),
        ({"handle": bytes(HANDLE_LENGTH)}, ["cudaErrorInvalidValue", "the handle is none of this machine's GPUs"]),
        ({"byte_size": SIZE + 1}, [f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"]),
        ({"device_uuid": "0" * 32}, ["that this model does not see (it sees 2)", "--gpus", "instance_group"]),
    ],
    ids=["a handle of another length", "no handle", "more than was allocated", "a GPU not seen"],
)
@pytest.mark.parametrize("fence", [0, None], ids=["fenced", "unfenced"])
def test_memory_that_cannot_be_claimed_is_refused_and_the_client_may_free_it(
    cuda: FakeCuda,
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
    assert cuda.live == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_is_on_another_gpu_than_is_claimed_is_refused(
    client: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    claim = claim_of_allocation(allocation, device_uuid=client.device_uuid(1 - DEVICE))
    error = refusal(lambda: model.resolve(claim), allocation.handle)
    assert "cudaErrorMapBufferObjectFailed" in str(error)
    assert not has_users(region.segment.fileno())


def test_claimed_memory_that_was_freed_is_refused(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    allocation.free()
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation)), allocation.handle)
    assert "its owner has freed the memory" in str(error)
    assert not has_users(region.segment.fileno())


def test_memory_of_this_very_process_is_refused(
    client: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(lambda: client, region)
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: client))
    for work in (lambda: register(manager, allocation), lambda: model.resolve(claim_of_allocation(allocation))):
        error = refusal(work, allocation.handle)
        assert isinstance(error, RegionRefusedError)
        assert "cudaErrorDeviceUninitialized" in error.reason
        assert "exported by this very process, which has the memory already" in error.reason
    model.resolver.close()


def test_memory_that_no_slot_fences_is_refused_where_the_model_takes_none(
    cuda: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(lambda: cuda, region, foreign_regions=False)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation, fence=None)), allocation.handle)
    assert str(error) == f"{FIELD} refused: this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)"
    assert cuda.log == []
    assert model.resolve(claim_of_allocation(allocation)).memory.byte_size == SIZE
    model.resolver.close()


def test_too_much_memory_is_the_machines_fault(
    cuda: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=SIZE - 1, cuda=CudaAccess(lambda: cuda))
    error = refusal(lambda: register(manager, allocation), allocation.handle)
    assert "SHM_MAX_MAPPED_BYTES" in str(error)
    assert (cuda.live, manager.status()) == (NOTHING, [])
