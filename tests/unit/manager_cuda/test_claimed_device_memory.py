"""Device memory that a request claims: mapped, seen as mapped by the client, and unmapped."""

from __future__ import annotations

from typing import Any

import pytest

from shm_backend_utils.errors import RegionGoneError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from tests.unit.claims_of import claim_of_allocation, resolved, slot_of
from tests.unit.fake_gpu import BLOCK, MODEL, left_of
from tests.unit.manager_cuda.device_claims import DEVICE, NOTHING, Model, times


def test_claimed_memory_is_the_clients(model: Model, allocation: CudaAllocation) -> None:
    found = model.resolve(claim_of_allocation(allocation))
    assert (found.memory.begin, found.memory.byte_size) == (0, BLOCK)
    assert found.memory.attributes() == BufferAttributes(MemoryType.GPU, DEVICE, BLOCK, allocation.handle)


def test_claimed_memory_is_mapped_once_however_often_it_is_claimed(model: Model, allocation: CudaAllocation) -> None:
    regions = {model.resolve(claim_of_allocation(allocation)).mapped for _ in range(3)}
    assert (len(regions), times("cuIpcOpenMemHandle")) == (1, 1)


@pytest.mark.parametrize(("first", "second"), [(BLOCK, 100), (100, BLOCK)])
def test_another_descriptor_may_claim_more_or_less_of_the_same_memory(
    model: Model, allocation: CudaAllocation, first: int, second: int
) -> None:
    for byte_size in (first, second):
        assert model.resolve(claim_of_allocation(allocation, byte_size=byte_size)).memory.byte_size == byte_size


def test_the_client_sees_its_memory_mapped_as_long_as_an_array_lives(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    array: Any = model.resolve(claim_of_allocation(allocation)).memory.bytes()
    model.registry.unregister_all()
    model.unmap()
    assert has_users(region.segment.fileno())
    del array
    model.unmap()
    assert not has_users(region.segment.fileno())


def test_memory_is_unmapped_when_the_region_of_its_slot_was_removed(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    model.registry.drop_abandoned()
    assert left_of(MODEL).opened == 1
    region.segment.unlink()
    model.registry.drop_abandoned()
    model.unmap()
    assert left_of(MODEL) == NOTHING
    assert model.registry.statuses() == []


def test_memory_of_which_the_client_has_let_go_in_the_meantime_is_not_mapped(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    own = slot_of(model.resolver, region)
    region.segment.unlink()
    with pytest.raises(RegionGoneError, match=r"^regions\[1\] was removed by its owner"):
        resolved(model.resolver, claim_of_allocation(allocation), own)
    assert left_of(MODEL) == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_no_slot_fences_is_unmapped_before_the_answer(model: Model, allocation: CudaAllocation) -> None:
    """Nothing tells when its owner frees it, and he may after the answer."""
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
    assert (times("cuIpcOpenEventHandle"), left_of(MODEL).events) == (1, 1)
    del found, again
    model.registry.unregister_all()
    model.unmap()
    assert left_of(MODEL) == NOTHING
