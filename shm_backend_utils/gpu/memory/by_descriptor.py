"""GPU memory that processes share by a descriptor, which its owner hands over as it hands over sealed regions.

Unlike CUDA IPC, this needs no common namespaces of processes, and a process may map its own memory. The memory lives as
long as any process maps it. A mapping is for reading and writing, since one serves inputs and outputs.
"""

from __future__ import annotations

import functools
import os
import secrets
from typing import Final

from ...errors import RegionRefusedError, translate
from ...memory.descriptors import Access, Descriptor
from ...memory.handover.server import REGISTRY
from ...memory.locks import SharedLease
from ...protocol.claims import CudaDescriptorClaim
from ...protocol.layout import TOKEN_LENGTH
from ..errors import CudaError
from ..ordering import do_after_all_work
from ..runtime import CudaRuntime, whole_blocks
from .allocations import Allocation
from .mappings import CudaMapping

__all__ = ["DescriptorAllocation", "map_descriptor"]

_NO_FILE_SYSTEM: Final = -2  # CUDA IPC has -1


class _Mapped:
    """Memory that is mapped here. After the last reference is gone, it is unmapped, and its lease is given back."""

    _process = 0

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int, lease: SharedLease | None) -> None:
        self.byte_size = byte_size
        self.device = device
        self._runtime = runtime
        self._lease = lease
        self._addresses: list[int] = []
        self._process = os.getpid()

    @property
    def address(self) -> int:
        return self._addresses[0]

    def __del__(self) -> None:
        if self._process == os.getpid():
            for address in self._addresses:
                unmap = functools.partial(_unmap, self._runtime, address, self.byte_size, self.device, self._lease)
                do_after_all_work(self._runtime, (self.device,), unmap)
        elif self._lease is not None:
            self._lease.give_back()  # a forked child owns only its copy of the lease's descriptor


def _unmap(runtime: CudaRuntime, address: int, byte_size: int, device: int, lease: SharedLease | None) -> None:
    runtime.unmap(address, byte_size, device)
    if lease is not None:
        lease.give_back()  # last, and only if CUDA has unmapped the memory


class DescriptorAllocation(Allocation):
    """Memory that this process hands over by a descriptor; freed when nothing here and no model keeps it."""

    claim: CudaDescriptorClaim
    _owned: _Owned | None

    @classmethod
    def make(cls, runtime: CudaRuntime, byte_size: int, device: int, access: Access) -> DescriptorAllocation | None:
        """Allocate memory for models that have ``access``; None if the device has none that descriptors share."""
        if not runtime.shares_by_descriptor(device):
            return None
        owned = _Owned(runtime, whole_blocks(byte_size), device)
        if not owned.is_there:
            return None
        return cls(owned, owned.address, owned.byte_size, device, owned.offer(access))

    def free(self) -> None:
        """Stop handing out the memory, and release it. Twice is fine."""
        if self._owned is not None:
            self._owned.withdraw()
        super().free()


class _Owned(_Mapped):
    """Memory that this process has made, with its descriptor, which it hands out."""

    def __init__(self, runtime: CudaRuntime, byte_size: int, device: int) -> None:
        super().__init__(runtime, byte_size, device, None)
        self._number = next(REGISTRY.numbers)
        self._descriptor: Descriptor | None = None
        made = runtime.create_shareable(byte_size, device)
        if made is not None:
            self._addresses.append(made[0])
            self._descriptor = made[1]

    @property
    def is_there(self) -> bool:
        return self._descriptor is not None

    def offer(self, access: Access) -> CudaDescriptorClaim:
        assert self._descriptor is not None
        token = secrets.token_bytes(TOKEN_LENGTH)
        key = REGISTRY.offer(self._number, token, access, self._descriptor.duplicate)
        uuid = self._runtime.device_uuid(self.device)
        return CudaDescriptorClaim(str(key), self.byte_size, token.hex(), uuid, 0, waits=True)

    def withdraw(self) -> None:
        REGISTRY.withdraw(self._number)

    def __del__(self) -> None:
        if self._process == os.getpid():  # a forked child has another registry
            self.withdraw()
        super().__del__()


class _Imported(_Mapped):
    """Another owner's memory: the use of a :class:`.CudaMapping`, which arrays keep."""

    is_idle = False  # the device is waited for all the same

    def __init__(
        self, runtime: CudaRuntime, descriptor: Descriptor, claim: CudaDescriptorClaim, device: int, lease: SharedLease
    ) -> None:
        super().__init__(runtime, claim.byte_size, device, lease)
        self._addresses.append(runtime.import_shareable(descriptor.fileno(), claim.byte_size, device))

    def end(self) -> None:
        """Unmap the memory now, when no GPU uses it."""
        while self._addresses:
            self._runtime.unmap(self._addresses.pop(), self.byte_size, self.device)
        if self._lease is not None:
            self._lease.give_back()


def map_descriptor(
    runtime: CudaRuntime,
    descriptor: Descriptor,
    claim: CudaDescriptorClaim,
    device: int,
    field: str,
    lease: SharedLease,
) -> CudaMapping:
    """Map the memory of a descriptor that was handed over. The end of the mapping gives the lease back."""

    def meaning(error: CudaError) -> RegionRefusedError:
        if error.name == "CUDA_ERROR_NOT_SUPPORTED":
            reason = f"it is not {claim.byte_size} bytes of memory that GPU {device} can map"
            return RegionRefusedError(f"{field}.byte_size", f"{reason}; claim the whole allocation")
        return RegionRefusedError(field, f"the descriptor that its client handed over is not GPU memory: {error}")

    with translate(CudaError, meaning):
        try:
            imported = _Imported(runtime, descriptor, claim, device, lease)
        except BaseException:
            lease.give_back()
            raise
        try:
            found = runtime.pointer(imported.address)
            if (found.kind, found.device) != ("device", device):
                where = f"on GPU {found.device}" if found.kind == "device" else f"{found.kind} memory"
                raise RegionRefusedError(field, f"it is {where}, but claims to be on GPU {device}")
        except BaseException:
            imported.end()  # now: an error's traceback may keep the memory for long
            raise
    secret = f"{claim.key} {claim.token} {claim.device_uuid}"  # else other clients could name this mapping
    identity = _NO_FILE_SYSTEM, int.from_bytes(secret.encode(), "big")
    return CudaMapping(runtime, imported.address, claim.byte_size, device, identity, imported)
