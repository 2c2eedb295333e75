"""What a client says in its descriptors of the memory that a test has made."""

from __future__ import annotations

from typing import Any

from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.descriptor import CudaRegionClaim, SystemRegionClaim

__all__ = ["claim_of_allocation", "claim_of_region"]


def claim_of_region(region: ManagedRegion, slot: int = 0) -> SystemRegionClaim:
    return SystemRegionClaim(region.segment.key, region.header.byte_size, region.header.token.hex(), slot)


def claim_of_allocation(allocation: CudaAllocation, **changes: Any) -> CudaRegionClaim:
    """Return a claim of device memory that the slot of the descriptor's first region fences."""
    fields = {
        "handle": allocation.handle,
        "byte_size": allocation.byte_size,
        "device_uuid": allocation.device_uuid,
        "slot_region": 0,
    }
    return CudaRegionClaim(**{**fields, **changes})
