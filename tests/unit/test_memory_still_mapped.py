"""Device memory that CUDA does not unmap: its owner must not free it, while the process that has it mapped lives."""

from __future__ import annotations

import os

import pytest

from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMappings
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.fake_gpu import runtime_that_gives_all_back

SIZE = 4096


@pytest.mark.parametrize("fails", [False, True])
def test_the_lease_is_held_as_long_as_the_memory_is_mapped(fails: bool) -> None:
    region = SlotRegion(SIZE, 1, PAGE_SIZE, PRIVATE)
    fence = os.open(f"/dev/shm/{region.key}", os.O_RDWR)
    with runtime_that_gives_all_back() as cuda, runtime_that_gives_all_back() as peer:
        allocation = CudaAllocation(cuda, SIZE, 0)
        lease = use(fence)
        mapping = CudaMappings(peer).map(allocation.handle, SIZE, 0, "memory", lease)
        if fails:
            peer.fail_next("close", "cudaErrorIllegalAddress")
        mapping.close()
        assert has_users(fence) is fails
        if fails:
            peer.close(mapping.address)
        lease.give_back()
        allocation.free()
    os.close(fence)
    region.destroy()
