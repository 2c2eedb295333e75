"""What the tests of this folder register or claim on a GPU."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError, ShmError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import SharedMemoryManager
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, LiveCounts
from tests.unit.claims_of import Resolved, resolved, slot_of
from tests.unit.fake_gpu import SIZE

DEVICE = 1
NOTHING = LiveCounts()


def register(
    manager: SharedMemoryManager, allocation: CudaAllocation, name: str = "mine", byte_size: int = SIZE
) -> MappedRegion:
    manager.register_cuda_shared_memory(name, allocation.handle, byte_size, DEVICE)
    found = manager._registry.find(name)
    assert found is not None
    return found[0]


class Model:
    """Resolves requests that name a slot of a managed region, and then device memory."""

    def __init__(
        self, cuda: Callable[[], FakeCuda], region: ManagedRegion, limit: int | None = None, **config: Any
    ) -> None:
        self.resolver = Resolver(Config(max_mapped_bytes=limit, **config), CudaAccess(cuda))
        self.registry = self.resolver.registry
        self._region = region

    def resolve(self, claim: CudaRegionClaim) -> Resolved:
        return resolved(self.resolver, claim, slot_of(self.resolver, self._region))


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


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
