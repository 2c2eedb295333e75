"""Device memory in a model: claimed by requests or registered by hand, mapped, seen as mapped, unmapped, or refused."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.errors import CallerError, MachineError, RegionRefusedError, ShmError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import has_borrowers, has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from tests.unit.claims_of import Resolved, claim_of_allocation, resolved, slot_of
from tests.unit.gpu.fakes import BLOCK, DRIVER, MODEL, NOTHING, SIZE, collect_all, content, left_of

DEVICE = 1
FIELD = "regions[1]"


class Model:
    def __init__(self, cuda: Callable[[], CudaRuntime], region: ManagedRegion, **config: Any) -> None:
        self.resolver = Resolver(Config(**config), CudaAccess(cuda))
        self._region = region

    def resolve(self, claim: CudaRegionClaim) -> Resolved:
        return resolved(self.resolver, claim, slot_of(self.resolver, self._region))

    def close(self) -> None:
        self.resolver.close()


@pytest.fixture
def allocation(client_cuda: CudaRuntime) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client_cuda, SIZE, DEVICE)
    yield allocation
    allocation.free()


@pytest.fixture
def model(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[Model]:
    with contextlib.closing(Model(lambda: cuda, region)) as model:
        yield model


@pytest.fixture
def manager(cuda: CudaRuntime, allocation: CudaAllocation) -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    yield manager
    manager.unregister_all()


def register(manager: SharedMemoryManager, allocation: CudaAllocation, name: str = "mine") -> MappedRegion:
    manager.register_cuda_shared_memory(name, allocation.handle, SIZE, DEVICE)
    return manager._registry.names[name]


def refusal(work: Callable[[], object], *secrets: bytes) -> ShmError:
    """Return the error of a memory that cannot be had: of the caller or of the machine, and without any secret."""
    with pytest.raises((RegionRefusedError, MachineError)) as caught:
        work()
    error = caught.value
    for secret in secrets:
        for text in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
            assert text not in str(error)
    del caught  # it has the frames, and what they hold
    return error.with_traceback(None)


@pytest.mark.parametrize(("first", "second"), [(BLOCK, 100), (100, BLOCK)])
def test_claims_of_one_memory_may_differ(model: Model, allocation: CudaAllocation, first: int, second: int) -> None:
    for byte_size in (first, second):
        assert model.resolve(claim_of_allocation(allocation, byte_size=byte_size)).memory.byte_size == byte_size


def test_memory_that_no_slot_fences_is_unmapped_before_the_answer(model: Model, allocation: CudaAllocation) -> None:
    claim = claim_of_allocation(allocation, fence=None)
    for _ in range(2):
        in_use = model.resolver.open_further(Table({}, {}, (claim,)), None)
        model.resolver.sweep()
        assert left_of(MODEL).opened == 1
        in_use.unmap_passing()
        in_use.release()
        assert left_of(MODEL) == NOTHING


def test_the_clients_event_is_opened_and_closed_with_its_memory(model: Model, allocation: CudaAllocation) -> None:
    found: Any = model.resolve(claim_of_allocation(allocation))
    again: Any = model.resolve(claim_of_allocation(allocation))
    assert found.mapped.segment.event
    assert found.mapped.segment.event == again.mapped.segment.event
    assert (DRIVER.count("cuIpcOpenEventHandle", MODEL), left_of(MODEL).events) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": bytes(HANDLE_LENGTH)}, ["CUDA_ERROR_INVALID_VALUE", "the handle is none of this machine's GPUs"]),
        ({"byte_size": BLOCK + 1}, [f"it claims {BLOCK + 1} bytes of an allocation of {BLOCK}"]),
        ({"device_uuid": "0" * 32}, ["that this model does not see (it sees 2)", "--gpus", "instance_group"]),
    ],
    ids=["no handle", "more than was allocated", "a GPU not seen"],
)
@pytest.mark.parametrize("fence", [0, None], ids=["fenced", "unfenced"])
def test_memory_that_cannot_be_claimed_is_refused_and_the_client_may_free_it(
    cuda: CudaRuntime,
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
    collect_all(cuda)
    assert left_of(MODEL) == NOTHING
    assert not has_users(region.segment.fileno())


def test_unfenced_memory_may_be_refused(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> None:
    model = Model(lambda: cuda, region, foreign_regions=False)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation, fence=None)), allocation.handle)
    assert str(error) == f"{FIELD} refused: this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)"
    assert DRIVER.count("cuIpcOpenMemHandle", MODEL) == 0
    assert model.resolve(claim_of_allocation(allocation)).memory.byte_size == BLOCK
    model.close()


@pytest.mark.parametrize("changes", [{"is_for_one_request": True}, {"fence": None}], ids=["lent", "not fenced"])
def test_memory_for_one_request_that_is_too_much_is_unmapped_before_that_is_told(
    cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation, changes: dict[str, Any]
) -> None:
    model = Model(lambda: cuda, region, max_mapped_bytes=BLOCK - 1)
    slot = slot_of(model.resolver, region)
    said = Table({}, {}, (claim_of_allocation(allocation, **changes),))
    with pytest.raises(MachineError, match="SHM_MAX_MAPPED_BYTES") as caught:  # which keeps the frames
        model.resolver.open_further(said, slot)
    assert left_of(MODEL) == NOTHING
    assert not has_borrowers(region.segment.fileno(), layout.record_offset(0, region.header.record_byte_size))
    del caught, slot
    model.close()


# Registered by hand


def test_registered_memory_is_the_clients(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    here = DRIVER.memory(allocation.address, (SIZE,), np.uint8)
    here[:] = 0
    part = manager.get_memory_info("mine", 100, 10)
    content(part.memory)[:] = 42
    assert here[99:111].tolist() == [0, *[42] * 10, 0]
    assert part.attributes == BufferAttributes(MemoryType.GPU, DEVICE, 10, allocation.handle)
    assert manager.status() == [RegionStatus("mine", "", 0, SIZE)]
    with pytest.raises(CallerError, match=f"of region 'mine' were asked for; expected 0 to {SIZE}"):
        manager.get_memory_info("mine", 1, SIZE)
    with pytest.raises(CallerError, match="region 'mine' is registered already; unregister it first"):
        register(manager, allocation)
