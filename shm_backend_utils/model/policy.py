"""Which memory a request may name. A claim goes in, a checked and mapped region comes out; nobody checks again.

===========================  =========================================================================================
what is named                what must hold
===========================  =========================================================================================
anything                     a regular file in /dev/shm, no symbolic link, owned by an allowed user, as large as claimed
by key                       our prefix, a ready header of exactly the claimed size, the header's token, a slot of it
by CUDA handle               the GPU is one of this process', and the allocation as large as claimed; a slot of a region
                             that is named by key fences it, unless memory that nothing fences is allowed
by name                      registered at the server; neither one of our managed regions, which need their token, nor
                             memory of the Python backend itself
===========================  =========================================================================================
"""

from __future__ import annotations

import re
from typing import Final

from ..errors import DescriptorError, MachineError, RegionGoneError, RegionRefusedError
from ..memory.cuda.memory import CudaAccess, CudaMapping, device_of
from ..memory.locks import use
from ..memory.managed import KEY_PREFIX, ManagedRegion
from ..memory.registrations import Registration, fetch_registrations
from ..memory.segment import SystemSegment
from ..protocol.descriptor import CudaRegionClaim, LentRegionClaim, NamedRegionClaim, SystemRegionClaim
from .settings import Settings

__all__ = ["check_slot", "open_cuda", "open_managed", "open_registered", "resolve"]

_MANAGED_KEY: Final = re.compile(re.escape(KEY_PREFIX) + r"[0-9a-z-]{1,64}")
_RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"


def open_managed(claim: SystemRegionClaim | LentRegionClaim, settings: Settings, field: str) -> ManagedRegion:
    """Open the managed region of a claim.

    Raises
    ------
    RegionRefusedError
        The key is not one of ours, or what lies there is not the region that is claimed.
    RegionGoneError
        There is nothing there.
    DescriptorError
        The claim's slot is not in the region.
    """
    if not _MANAGED_KEY.fullmatch(claim.key):
        raise RegionRefusedError(f"{field}.key", "it is not the key of a managed region")
    region = ManagedRegion.open(claim.key, claim.byte_size, claim.token, field)
    try:
        _check_owner(region.segment, settings, field)
        check_slot(region, claim, field)
    except BaseException:
        region.close()
        raise
    return region


def open_cuda(
    claim: CudaRegionClaim, fence: SystemSegment | None, settings: Settings, cuda: CudaAccess, field: str
) -> CudaMapping:
    """Map the device memory of a claim; ``fence`` is the region whose slot fences it.

    Raises
    ------
    RegionRefusedError
        It is on a GPU that this process does not see, is no longer there, is smaller than claimed, or has no slot and
        this model takes no such memory.
    MachineError
        CuPy, the driver or the GPU is missing.
    """
    if fence is None and not settings.foreign_regions:
        raise RegionRefusedError(field, "this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)")
    mappings = cuda.mappings
    device = device_of(mappings.runtime, claim.device_uuid, field)
    if fence is None:
        return mappings.map(claim.handle, claim.byte_size, device, field)
    lease = use(fence.fileno())
    try:
        fence.check(0, field)  # its owner unlinks it, looks for leases, and then frees: one of us sees the other
    except BaseException:
        lease.give_back()
        raise
    return mappings.map(claim.handle, claim.byte_size, device, field, lease)


def check_slot(region: ManagedRegion, claim: SystemRegionClaim | LentRegionClaim, field: str) -> None:
    """Raise DescriptorError unless the region has the claim's slot."""
    if claim.slot >= region.header.slot_count:
        raise DescriptorError(
            f"{field.removeprefix('shm_io.')}.slot", str(claim.slot), f"less than {region.header.slot_count}"
        )


def resolve(claim: NamedRegionClaim, settings: Settings, field: str) -> Registration:
    """Return what a name stands for at the server, if names are allowed.

    Raises
    ------
    RegionRefusedError
        This model does not take names, or the name stands for memory that must not be reached by name.
    RegionGoneError
        It stands for nothing.
    MachineError
        The server does not answer.
    """
    if not settings.foreign_regions:
        raise RegionRefusedError(field, "this model takes no regions by name (its SHM_FOREIGN_REGIONS is off)")
    try:
        registration = fetch_registrations(settings.server_url).get(claim.name)
    except MachineError as error:
        raise MachineError(
            f"{field} is known by its registered name alone, and {error}; set the parameter SHM_SERVER_URL in "
            "config.pbtxt to http://HOST:PORT"
        ) from None
    if registration is None:
        raise RegionGoneError(f"{field} is not registered at the server; register it as system shared memory first")
    key = registration.key.removeprefix("/")
    if key.startswith(_RESERVED_PREFIX):
        raise RegionRefusedError(field, "it is memory of Triton's Python backend")
    if key.startswith(KEY_PREFIX):
        raise RegionRefusedError(field, "it is a managed region; name it by its key and token")
    if "/" in key or key in ("", ".", ".."):
        raise RegionRefusedError(field, "it is not an object directly in /dev/shm")
    return registration


def open_registered(registration: Registration, settings: Settings, field: str) -> SystemSegment:
    """Open what a registration stands for; raises what :func:`open_managed` raises."""
    end = registration.offset + registration.byte_size
    segment = SystemSegment.open(registration.key.removeprefix("/"), end, field)
    try:
        _check_owner(segment, settings, field)
    except BaseException:
        segment.close()
        raise
    return segment


def _check_owner(segment: SystemSegment, settings: Settings, field: str) -> None:
    allowed = settings.allowed_uids
    if allowed is not None and segment.owner_uid not in allowed:
        raise RegionRefusedError(
            field, f"it belongs to user {segment.owner_uid}, whom the model's SHM_ALLOWED_UIDS does not allow"
        )
