"""Which memory a request may name. A claim goes in, a checked and mapped region comes out; nobody checks again."""

from __future__ import annotations

import re
from typing import Final

from ..descriptor import SystemRegionClaim
from ..errors import DescriptorError, RegionRefusedError
from ..region.managed import KEY_PREFIX, ManagedRegion

__all__ = ["check", "open_claimed"]

_MANAGED_KEY: Final = re.compile(re.escape(KEY_PREFIX) + r"[0-9a-z-]{1,64}")


def open_claimed(claim: SystemRegionClaim, field: str) -> ManagedRegion:
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
        raise RegionRefusedError(f"shm_io.{field}.key", "it is not the key of a managed region")
    region = ManagedRegion.open(claim.key, claim.byte_size, claim.token, f"shm_io.{field}")
    try:
        _check_slot(region, claim, field)
    except BaseException:
        region.close()
        raise
    return region


def check(region: ManagedRegion, claim: SystemRegionClaim, field: str) -> None:
    """Raise as :func:`open_claimed` does, unless the open region still is what a claim of the same key says."""
    region.check(claim.byte_size, claim.token, f"shm_io.{field}")
    _check_slot(region, claim, field)


def _check_slot(region: ManagedRegion, claim: SystemRegionClaim, field: str) -> None:
    if claim.slot >= region.header.slot_count:
        raise DescriptorError(f"{field}.slot", str(claim.slot), f"less than {region.header.slot_count}")
