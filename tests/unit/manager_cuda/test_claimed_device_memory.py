"""Device memory that a request claims: mapped, seen as mapped by the client, and unmapped."""

from __future__ import annotations

from typing import Any

import pytest

from shm_backend_utils.errors import RegionGoneError
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.claims_of import claim_of_allocation, resolved, slot_of
from tests.unit.fake_gpu import SIZE
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, Model, times


def test_claimed_memory_is_the_clients(model: Model, allocation: CudaAllocation) -> None:
    found = model.resolve(claim_of_allocation(allocation))
    assert (found.memory.begin, found.memory.byte_size) == (0, SIZE)
    assert found.memory.attributes() == BufferAttributes(MemoryType.GPU, DEVICE, SIZE, allocation.handle)


def test_claimed_memory_is_mapped_once_however_often_it_is_claimed(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    regions = {model.resolve(claim_of_allocation(allocation)).mapped for _ in range(3)}
    assert (len(regions), times(cuda, "open")) == (1, 1)


def test_the_gpu_is_found_by_its_uuid_whatever_its_number(
    client: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    cuda = FakeCuda(uuids=[client.device_uuid(1), client.device_uuid(0)])
    model = Model(lambda: cuda, region)
    assert model.resolve(claim_of_allocation(allocation)).memory.attributes().memory_type_id == 0
    model.resolver.close()


@pytest.mark.parametrize(("first", "second"), [(SIZE, 100), (100, SIZE)])
def test_another_descriptor_may_claim_more_or_less_of_the_same_memory(
    model: Model, allocation: CudaAllocation, first: int, second: int
) -> None:
    for byte_size in (first, second):
        assert model.resolve(claim_of_allocation(allocation, byte_size=byte_size)).memory.byte_size == byte_size


def test_the_client_sees_that_its_memory_is_mapped(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    assert has_users(region.segment.fileno())
    model.registry.unregister_all()
    assert not has_users(region.segment.fileno())


def test_the_client_sees_its_memory_mapped_as_long_as_an_array_lives(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    array: Any = model.resolve(claim_of_allocation(allocation)).memory.bytes()
    model.registry.unregister_all()
    assert has_users(region.segment.fileno())
    del array
    assert not has_users(region.segment.fileno())


def test_memory_is_unmapped_when_the_region_of_its_slot_was_removed(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    model.registry.drop_abandoned()
    assert cuda.live.opened == 1
    region.segment.unlink()
    model.registry.drop_abandoned()
    assert cuda.live == NOTHING
    assert model.registry.statuses() == []


def test_memory_of_which_the_client_has_let_go_in_the_meantime_is_not_mapped(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    own = slot_of(model.resolver, region)
    region.segment.unlink()
    with pytest.raises(RegionGoneError, match=r"^regions\[1\] was removed by its owner"):
        resolved(model.resolver, claim_of_allocation(allocation), own)
    assert cuda.live == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_no_slot_fences_is_unmapped_when_nobody_uses_it(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    claim = claim_of_allocation(allocation, fence=None)
    in_use = model.resolver.open_further(Table({}, {}, (claim,)), None)
    model.resolver.sweep()
    assert cuda.live.opened == 1
    in_use.release()
    assert cuda.live.opened == 1  # it serves the next request, if that comes soon
    del in_use
    model.resolver.sweep()
    assert cuda.live == NOTHING


def test_memory_that_a_slot_fences_stays_mapped_for_the_next_request(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    model.resolver.sweep()
    assert cuda.live.opened == 1
