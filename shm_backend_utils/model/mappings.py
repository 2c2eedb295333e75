"""The regions that are mapped into this process: each once, as long as its owner keeps it."""

from __future__ import annotations

from ..descriptor import SystemRegionClaim
from ..errors import RegionGoneError
from ..region.managed import ManagedRegion
from . import policy

__all__ = ["Mappings"]


class Mappings:
    """Maps each region at its first use. Not thread-safe: its owner locks.

    A key is only a name: behind it may lie another object by the time of the next request. So whoever uses a region
    looks at the open file itself first (:meth:`SystemSegment.check`), and one that was unlinked is forgotten here. Its
    memory goes when the last array over it is gone.
    """

    def __init__(self) -> None:
        self._regions: dict[str, ManagedRegion] = {}

    def get(self, claim: SystemRegionClaim, field: str) -> ManagedRegion:
        """Return the claimed region, checked; raises what :func:`policy.open_claimed` raises."""
        region = self._regions.get(claim.key)
        if region is not None:
            try:
                policy.check(region, claim, field)
            except RegionGoneError:
                self._forget(claim.key)
            else:
                return region
        region = policy.open_claimed(claim, field)
        self._regions[claim.key] = region
        return region

    def forget_unlinked(self) -> None:
        """Unmap the regions that their owners have removed."""
        for key in [key for key, region in self._regions.items() if region.segment.is_unlinked]:
            self._forget(key)

    def close(self) -> None:
        """Unmap everything that no array needs any more."""
        for key in list(self._regions):
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._regions.pop(key).close()
