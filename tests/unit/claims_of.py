"""What a model finds under the words by which a client names the memory that a test has made."""

from __future__ import annotations

from typing import Any, NamedTuple

from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.mapped import MappedRegion, MappedSlot
from shm_backend_utils.model.mapping.memory import MappedMemory
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim, RegionClaim
from shm_backend_utils.protocol.parameters import SlotAddress
from shm_backend_utils.protocol.spans import Table

__all__ = ["Resolved", "address_of", "claim_of_allocation", "claim_of_region", "resolved", "slot_of"]


def address_of(region: ManagedRegion, slot: int = 0) -> SlotAddress:
    return SlotAddress("m", region.segment.key, region.header.token.hex(), slot)


def slot_of(resolver: Resolver, region: ManagedRegion, slot: int = 0) -> MappedSlot:
    address = address_of(region, slot)
    return resolver.open_slot(str(address), address)


def claim_of_region(region: ManagedRegion, **changes: Any) -> LentRegionClaim:
    fields = {
        "key": region.segment.key,
        "byte_size": region.header.byte_size,
        "token": region.header.token.hex(),
        "slot": 0,
    }
    return LentRegionClaim(**{**fields, **changes})


def claim_of_allocation(allocation: CudaAllocation, **changes: Any) -> CudaRegionClaim:
    """Return a claim of device memory that the request's own slot fences."""
    fields = {
        "handle": allocation.handle,
        "byte_size": allocation.byte_size,
        "device_uuid": allocation.device_uuid,
        "fence": 0,
        "waits": True,
    }
    return CudaRegionClaim(**{**fields, **changes})


class Resolved(NamedTuple):
    """A further region of a request, as a model has it."""

    mapped: MappedRegion
    memory: MappedMemory


def resolved(resolver: Resolver, claim: RegionClaim, own: MappedSlot | None = None) -> Resolved:
    """Return what a claim leads to; it is not in use any more."""
    found = resolver.open_further(Table({}, {}, (claim,)), own)
    (mapped,), (memory,) = found.mapped, found.memories
    found.release()
    return Resolved(mapped, memory)
