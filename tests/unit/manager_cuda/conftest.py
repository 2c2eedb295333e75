"""A model that claims or registers device memory, and a client that has it: virtual processes of the fake driver."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import MachineError, RegionRefusedError, ShmError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.unit.claims_of import Resolved, resolved, slot_of
from tests.unit.fake_gpu import DRIVER, MODEL, SIZE, wait_until

DEVICE = 1
NOTHING = LiveCounts()


def register(
    manager: SharedMemoryManager, allocation: CudaAllocation, name: str = "mine", byte_size: int = SIZE
) -> MappedRegion:
    manager.register_cuda_shared_memory(name, allocation.handle, byte_size, DEVICE)
    return manager._registry.names[name]


class Model:
    """Resolves requests that name a slot of a managed region, and then device memory."""

    def __init__(
        self, cuda: Callable[[], CudaRuntime], region: ManagedRegion, limit: int | None = None, **config: Any
    ) -> None:
        self.resolver = Resolver(Config(max_mapped_bytes=limit, **config), CudaAccess(cuda))
        self.registry = self.resolver.registry
        self._region = region

    def resolve(self, claim: CudaRegionClaim) -> Resolved:
        return resolved(self.resolver, claim, slot_of(self.resolver, self._region))

    def unmap(self) -> None:
        """Unmap what nobody refers to any more."""
        wait_until(lambda: not self.resolver._cuda.collect())


def times(function: str) -> int:
    """Return how often the model's process has called a function of the driver."""
    return DRIVER.count(function, MODEL)


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


def close_lease_on(region: ManagedRegion) -> None:
    """Close what the library keeps open for ever, as it cannot know better."""
    for link in Path("/proc/self/fd").iterdir():
        is_other = link.is_symlink() and int(link.name) != region.segment.fileno()
        if is_other and region.segment.key in str(link.readlink()):
            os.close(int(link.name))


@pytest.fixture
def allocation(client_cuda: CudaRuntime) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client_cuda, SIZE, DEVICE)
    yield allocation
    allocation.free()


@pytest.fixture
def manager(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    yield manager
    manager.unregister_all()


@pytest.fixture
def model(cuda: CudaRuntime, region: ManagedRegion, allocation: CudaAllocation) -> Iterator[Model]:
    model = Model(lambda: cuda, region)
    yield model
    model.resolver.close()
