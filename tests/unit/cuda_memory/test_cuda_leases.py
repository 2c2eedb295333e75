"""The lease by which the owner sees that its device memory is mapped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMapping, CudaMappings
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, NOTHING, whole
from tests.unit.fake_gpu import SIZE


@pytest.fixture
def fence() -> Iterator[int]:
    """A region, open, on which users of the memory show themselves to its owner."""
    region = ManagedRegion.create(1)
    yield region.segment.fileno()
    region.segment.unlink()
    region.close()


def leased(allocation: CudaAllocation, mappings: CudaMappings, fence: int) -> CudaMapping:
    return mappings.map(allocation.handle, SIZE, DEVICE, FIELD, use(fence))


def test_a_lease_is_held_until_the_memory_is_closed(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    array = whole(mapping)
    mapping.close()
    assert has_users(fence)
    del array
    assert (peer.live, has_users(fence)) == (NOTHING, False)


def test_the_lease_of_memory_that_is_mapped_already_is_the_first_ones(
    allocation: CudaAllocation, mappings: CudaMappings, fence: int
) -> None:
    first = leased(allocation, mappings, fence)
    second = leased(allocation, mappings, fence)
    first.close()
    assert has_users(fence)
    second.close()
    assert not has_users(fence)


@pytest.mark.parametrize("method", ["set_device", "open", "extent"])
def test_a_lease_is_given_back_when_the_memory_is_refused(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, fence: int, method: str
) -> None:
    peer.fail_next(method, "cudaErrorUnknown")
    with pytest.raises(RegionRefusedError):
        leased(allocation, mappings, fence)
    assert not has_users(fence)
