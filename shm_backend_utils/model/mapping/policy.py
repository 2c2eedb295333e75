"""The rules for memory that requests name: they turn a claim into a checked and mapped region.

A file is opened, then checked, then mapped. The owner is checked first: nothing is read from another user's file.

===========================  =========================================================================================
memory                       conditions
===========================  =========================================================================================
any file                     a regular file in /dev/shm, no symbolic link, or sealed memory; its owner is allowed; not
                             every user can write to it; it is as large as claimed, with memory for all of that
by key                       our prefix; a ready header that fits the file; the header's token; an existing slot
by key, sealed               the named socket belongs to an allowed user, and hands over a memfd
by CUDA handle               this process sees the GPU; the allocation is as large as claimed; a slot of a region that
                             is named by key fences it, unless unfenced memory is allowed; a lease on the slot
                             shows the client that memory lent for one request is in use
GPU memory by descriptor     the same, always with a fence; the named socket belongs to an allowed user, and hands over
                             GPU memory of exactly the claimed size
by name                      registered at the server; neither a managed region, which needs its token, nor memory of
                             the Python backend itself
===========================  =========================================================================================
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence

from ...errors import MachineError, RegionGoneError, RegionRefusedError, StaleRequestError, TableError, shown
from ...gpu.memory.access import CudaAccess
from ...gpu.memory.by_descriptor import map_descriptor
from ...gpu.memory.mappings import CudaMapping, device_with
from ...memory.descriptors import Descriptor
from ...memory.handover.fetching import Fetcher
from ...memory.locks import SharedLease, borrow, use
from ...memory.managed import KEY_PREFIX, ManagedRegion
from ...memory.registrations import Registration, StatusEndpoint
from ...memory.segment import SystemSegment
from ...memory.shared_file import SharedFile, is_pool, owner_refused
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim, NamedRegionClaim
from ...protocol.handover import parse_sealed_key
from ..config import Config

__all__ = [
    "ask",
    "borrow_slot",
    "check_slot",
    "open_cuda",
    "open_cuda_descriptor",
    "open_managed",
    "open_registered",
    "resolve",
]


def borrow_slot(region: ManagedRegion, slot: int) -> SharedLease:
    """Take a lease on a slot, which shows the client that this process uses the memory lent with the slot."""
    lease = borrow(region.segment.fileno(), region.record_offset(slot))
    if lease is None:
        raise StaleRequestError("the client takes back the memory that was lent to this model")
    return lease


def open_managed(key: str, token: str, config: Config, fetcher: Fetcher, field: str) -> ManagedRegion:
    """Open a managed region, whose key the protocol has checked; errors name the ``field``."""
    sealed = parse_sealed_key(key)
    if sealed is None:
        file = SharedFile.open(key, field)
    else:
        file = fetcher.fetch(sealed, token, field, lambda uid: _is_allowed(uid, config))
    with file:
        _check_owner(file, config)
        return ManagedRegion.map(file, token)


def open_cuda(
    claim: CudaRegionClaim, fence: tuple[ManagedRegion, int] | None, config: Config, cuda: CudaAccess, field: str
) -> CudaMapping:
    """Map the GPU memory of a claim; a lease on the fencing slot shows that the memory is in use."""
    if fence is None and not config.foreign_regions:
        raise RegionRefusedError(field, "this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)")
    mappings = cuda.mappings
    device = device_with(mappings.runtime, claim.device_uuid, field)
    lease = None
    if fence is not None:
        lease = borrow_slot(*fence) if claim.is_for_one_request else use(fence[0].segment.fileno())
        _check_sees(lease, fence[0], field)
    return mappings.map(claim.handle, claim.byte_size, device, field, lease)


def open_cuda_descriptor(
    claim: CudaDescriptorClaim, fence: ManagedRegion, config: Config, cuda: CudaAccess, fetcher: Fetcher, field: str
) -> CudaMapping:
    """Fetch and map the GPU memory of a claim; a lease on the fencing region shows that the memory is in use."""
    key = parse_sealed_key(claim.key)
    if key is None:
        raise TableError(f"{field}.name", "the key of a region in /dev/shm", "one of a handover")
    runtime = cuda.runtime
    device = device_with(runtime, claim.device_uuid, field)

    def map_it(descriptor: Descriptor) -> CudaMapping:
        lease = use(fence.segment.fileno())
        _check_sees(lease, fence, field)
        return map_descriptor(runtime, descriptor, claim, device, field, lease)

    return fetcher.take(key, claim.token, field, lambda uid: _is_allowed(uid, config), map_it)


def _check_sees(lease: SharedLease, region: ManagedRegion, field: str) -> None:
    """Raise an error unless the owner will see a new lease: it unlinks its region, and then looks for leases."""
    try:
        region.segment.check(0, field)
    except BaseException:
        lease.give_back()
        raise


def check_slot(region: ManagedRegion, slot: int, field: str) -> None:
    if slot >= region.header.slot_count:
        raise TableError(f"{field}.slot", str(slot), f"less than {region.header.slot_count}")


def ask(names: Sequence[str], endpoint: StatusEndpoint, config: Config, field: str) -> dict[str, Registration]:
    """Return the server's registrations of the names that it knows; RegionRefusedError if this model takes no names."""
    if not config.foreign_regions:
        raise RegionRefusedError(field, "this model takes no regions by name (its SHM_FOREIGN_REGIONS is off)")
    try:
        return endpoint.find(names)
    except MachineError as error:
        raise MachineError(
            f"the name of {field} cannot be looked up: {error}; if the server is elsewhere, set the parameter "
            "SHM_SERVER_URL in config.pbtxt to http://HOST:PORT"
        ) from None


def resolve(claim: NamedRegionClaim, found: Mapping[str, Registration], config: Config, field: str) -> Registration:
    """Return the registration of a name among those that :func:`ask` has found."""
    registration = found.get(claim.name)
    if registration is None:
        raise RegionGoneError(f"{field} is {shown(claim.name)}, which is not registered at the server; register it")
    key = registration.key.removeprefix("/")
    if is_pool(key, config.pool_prefix):
        raise RegionRefusedError(field, "it is memory of Triton's Python backend")
    if key.startswith(KEY_PREFIX):
        raise RegionRefusedError(field, "it is a managed region; name it by its key and token")
    if "/" in key or key in ("", ".", ".."):
        raise RegionRefusedError(field, "it is not an object directly in /dev/shm")
    return registration


def open_registered(
    registration: Registration, config: Config, field: str, check_room: Callable[[SharedFile], None]
) -> SystemSegment:
    """Open the memory of a registration and allocate its pages, unless ``check_room`` raises."""
    with SharedFile.open(registration.key.removeprefix("/"), field) as file:
        _check_owner(file, config)
        check_room(file)
        return SystemSegment.map_part(file, registration.offset, registration.byte_size)


def _is_allowed(uid: int, config: Config) -> bool:
    return config.allowed_uids is None or uid in config.allowed_uids


def _check_owner(file: SharedFile, config: Config) -> None:
    """Raise RegionRefusedError unless an allowed user owns the file; also if every user can write to and shrink it."""
    if config.allowed_uids is None:
        return
    if not _is_allowed(file.status.st_uid, config):
        raise owner_refused(file.field, file.status.st_uid)
    if file.status.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(file.status.st_mode)
        raise RegionRefusedError(
            file.field,
            f"its mode {mode:04o} lets every user write to it; expected 0600, or 0660 and a common group (only a model "
            "whose SHM_ALLOWED_UIDS is any takes it)",
        )
