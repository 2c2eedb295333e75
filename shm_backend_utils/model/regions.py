"""A descriptor's regions, resolved: from claims to mappings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import RegionGoneError, RegionRefusedError
from ..memory.cuda.memory import CudaAccess
from ..memory.locks import SlotLease
from ..memory.managed import ManagedRegion
from ..memory.registrations import Registration, fetch_registrations
from ..memory.segment import SystemSegment
from ..protocol.descriptor import CudaRegionClaim, LentRegionClaim, NamedRegionClaim, RegionClaim, SystemRegionClaim
from ..protocol.region_layout import SlotRecord
from . import policy
from .manager import RegionStatus, SharedMemoryManager
from .mapped import MappedRegion
from .pinning import Pinning
from .settings import Settings

__all__ = ["ResolvedRegion", "Resolver", "UsedSlot"]


@dataclass(frozen=True, slots=True)
class UsedSlot:
    """The slot of a managed region that a call uses."""

    record: SlotRecord
    lease: SlotLease


@dataclass(frozen=True, slots=True)
class ResolvedRegion:
    """A region of a descriptor, mapped and checked.

    Attributes
    ----------
    field : str
        What to call it in messages.
    mapped : MappedRegion
        Its mapping.
    begin : int
        Where in the mapping offset 0 of the descriptor's spans is.
    data : range
        Offsets that spans may have.
    slot : UsedSlot or None
        None for a foreign region, for device memory, which the slot of another region fences, and for what is lent.
    lent_slot : int or None
        The slot of a lent region.
    """

    field: str
    mapped: MappedRegion
    begin: int
    data: range
    slot: UsedSlot | None
    lent_slot: int | None = None


class Resolver:
    """Turns claims into regions, with the help of a manager that remembers the mappings."""

    def __init__(
        self, settings: Settings, manager: SharedMemoryManager, cuda: CudaAccess, pinning: Pinning | None = None
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._cuda = cuda
        self._pinning = pinning
        self._registrations: dict[str, Registration] = {}
        self._unfenced: set[str] = set()

    def resolve(self, claim: RegionClaim, field: str, earlier: Sequence[ResolvedRegion]) -> ResolvedRegion:
        """Return the claimed region; raises what :mod:`.policy` raises, and MachineError for too much mapped memory.

        ``earlier`` are the regions that the descriptor names before this one.
        """
        if isinstance(claim, NamedRegionClaim):
            return self._resolve_named(claim, field)
        if isinstance(claim, CudaRegionClaim):
            fence = None if claim.slot_region is None else earlier[claim.slot_region].mapped
            return self._resolve_cuda(claim, fence, field)
        return self._resolve_managed(claim, field)

    def find_changed_registrations(self) -> list[str]:
        """Ask the server which of the names that were resolved do not stand for the same any more. May take seconds.

        Raises
        ------
        MachineError
            The server does not answer.
        """
        known = dict(self._registrations)
        if not known:
            return []
        current = fetch_registrations(self._settings.server_url)
        return [name for name, registration in known.items() if current.get(name) != registration]

    def forget_registrations(self, names: Iterable[str]) -> None:
        """Unmap the foreign regions of these names; they are resolved anew when they are used again."""
        for name in names:
            self._manager.unregister(_name_of_registered(name))
            self._registrations.pop(name, None)

    def forget_unfenced(self) -> None:
        """Unmap device memory that no slot fences and no call uses: nothing tells when its owner frees it."""
        for name in list(self._unfenced):
            found = self._manager.find(name)
            if found is None or not found[0].use_count:
                self._manager.unregister(name)
                self._unfenced.discard(name)

    def _resolve_cuda(self, claim: CudaRegionClaim, fence: MappedRegion | None, field: str) -> ResolvedRegion:
        name = f"cuda: {claim.handle.hex()}"

        def open_it() -> MappedRegion:
            segment = None if fence is None else fence.managed_segment
            return MappedRegion(policy.open_cuda(claim, segment, self._settings, self._cuda, field), fence)

        found = self._find(name, claim.byte_size, field)
        if found is None:
            self._manager.register(
                name,
                open_it,
                0,
                claim.byte_size,
            )
            if fence is None:
                self._unfenced.add(name)
            found = self._find(name, claim.byte_size, field)
            assert found is not None
        return ResolvedRegion(field, found[0], 0, range(claim.byte_size), None)

    def _resolve_managed(self, claim: SystemRegionClaim | LentRegionClaim, field: str) -> ResolvedRegion:
        found = self._find(claim.key, claim.byte_size, field)
        if found is None:
            self._manager.register(
                claim.key, lambda: self._mapped(policy.open_managed(claim, self._settings, field)), 0, claim.byte_size
            )
            found = self._find(claim.key, claim.byte_size, field)
            assert found is not None
        mapped, _ = found
        region = mapped.managed
        if region is None:
            raise RegionRefusedError(field, "it has no header of a managed region")
        region.check(claim.byte_size, claim.token, field)
        policy.check_slot(region, claim, field)
        data = range(region.data_offset, claim.byte_size)
        if isinstance(claim, LentRegionClaim):
            return ResolvedRegion(field, mapped, 0, data, None, claim.slot)
        slot = UsedSlot(region.record(claim.slot), region.lease(claim.slot))
        return ResolvedRegion(field, mapped, 0, data, slot)

    def _resolve_named(self, claim: NamedRegionClaim, field: str) -> ResolvedRegion:
        name = _name_of_registered(claim.name)
        registration = policy.resolve(claim, self._settings, field)
        if self._registrations.get(claim.name) != registration:
            self._manager.unregister(name)
        found = self._find(name, 0, field)
        if found is None:
            self._manager.register(
                name,
                lambda: self._mapped(policy.open_registered(registration, self._settings, field)),
                registration.offset,
                registration.byte_size,
            )
            self._registrations[claim.name] = registration
            found = self._find(name, 0, field)
            assert found is not None
        mapped, status = found
        return ResolvedRegion(field, mapped, status.offset, range(status.byte_size), None)

    def _mapped(self, opened: ManagedRegion | SystemSegment) -> MappedRegion:
        return MappedRegion(opened, pinning=self._pinning)

    def _find(self, name: str, byte_size: int, field: str) -> tuple[MappedRegion, RegionStatus] | None:
        """Return what is registered under a name, unless its object was removed: the name may have another by now."""
        found = self._manager.find(name)
        if found is None:
            return None
        try:
            found[0].segment.check(byte_size, field)
        except RegionGoneError:
            self._manager.unregister(name)
            return None
        return found


def _name_of_registered(name: str) -> str:
    return f"registered: {name}"  # no managed region's key has a colon
