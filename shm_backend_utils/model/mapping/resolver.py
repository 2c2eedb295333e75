"""Finds or maps the memory of requests: slots by address, further regions by claim and by name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import MachineError, StaleRequestError, TableError
from ...gpu.memory.access import CudaAccess
from ...gpu.memory.mappings import CudaMapping
from ...memory.handover.fetching import Fetcher
from ...memory.locks import SharedLease
from ...memory.managed import ManagedRegion
from ...memory.registrations import Registration, StatusEndpoint
from ...memory.repeater import Repeater
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim, LentRegionClaim, NamedRegionClaim, RegionClaim
from ...protocol.parameters import DESCRIPTOR_PARAMETER, SLOT_PARAMETER, SlotAddress, parse_address
from ...protocol.spans import Extent, InputSpan, OutputSpan, Table, check_extents_are_apart
from ..config import Config
from . import policy
from .mapped import MappedRegion, MappedSlot
from .memory import MappedMemory, Pinning
from .registry import Registry

__all__ = ["FurtherRegions", "NamedRegions", "Resolver", "collect_all"]


@dataclass(slots=True)
class FurtherRegions:
    """Regions that a request uses besides its own slot. Release them when the request ends."""

    memories: list[MappedMemory]  # of each further region, in the order of the table
    mapped: list[MappedRegion]  # the mappings of these regions
    borrowed: list[SharedLease]  # the leases on slots whose memory is lent
    passing: list[CudaMapping]  # GPU memory to unmap before the answer
    _registry: Registry
    _cuda: CudaAccess

    def take(self, claim: RegionClaim, mapped: MappedRegion, memory: MappedMemory) -> None:
        """Add a region, in use until :meth:`release`; StaleRequestError if the client takes back the lent memory."""
        self._registry.begin_use(mapped)
        self.mapped.append(mapped)
        self.memories.append(memory)
        if isinstance(claim, LentRegionClaim):
            assert mapped.managed is not None
            self.borrowed.append(policy.borrow_slot(mapped.managed, claim.slot))
        elif isinstance(claim, CudaRegionClaim) and _is_passing(claim):
            assert isinstance(mapped.segment, CudaMapping)
            self.passing.append(mapped.segment)

    def unmap_passing(self) -> None:
        """Unmap GPU memory that the owner may free after the answer, once GPUs are done; live arrays keep it mapped."""
        passing, self.passing = self.passing, []
        for mapping in passing:
            mapping.close_idle()
        if passing:
            self._cuda.collect_now()

    def release(self) -> None:
        """Release all regions. Twice is fine."""
        passing, self.passing = self.passing, []
        for mapping in passing:
            mapping.close()
        mapped, self.mapped = self.mapped, []
        for region in mapped:
            self._registry.end_use(region)
        for lease in self.borrowed:
            lease.give_back()


def _check_lender(own: MappedSlot | None) -> None:
    """Raise StaleRequestError if the lender, which owns the request's slot, is gone; call this after borrowing."""
    # A living lender holds its slots until it gets the answer or gives up. To give up, it first raises its generation.
    if own is None:
        raise TableError("regions", "a lent region", "none: the request has no slot of its own")
    if own.region.managed is None or own.region.managed.is_owner_gone:
        raise StaleRequestError("the model that lent its client's memory to this one is gone")


def _fence_of(table: Table, fence: int, own: MappedSlot | None, found: FurtherRegions) -> tuple[MappedRegion, int]:
    """Return the region and the number of the slot that fences GPU memory."""
    if fence:
        lent = table.regions[fence - 1]
        assert isinstance(lent, LentRegionClaim)  # the protocol has checked this
        return found.mapped[fence - 1], lent.slot
    if own is None:
        raise TableError("regions.fence", "0", "none: the request has no slot of its own")
    return own.region, own.number


def _check_parts_are_apart(table: Table, found: FurtherRegions) -> None:
    """Raise TableError if an output overlaps another tensor; two regions of a table may be parts of one object."""
    extents = [_extent(span, found, "") for span in table.inputs.values() if span.byte_size and span.region]
    extents += [_extent(span, found, name) for name, span in table.outputs.items() if span.byte_size and span.region]
    check_extents_are_apart(extents)


def _extent(span: InputSpan | OutputSpan, found: FurtherRegions, output: str) -> Extent:
    """Return which bytes of an object a span covers; the number of the object's first region identifies the object."""
    segment, begin = found.mapped[span.region - 1].segment, found.memories[span.region - 1].begin + span.offset
    first = next(number for number, each in enumerate(found.mapped) if each.segment.identity == segment.identity)
    return first, begin, begin + span.byte_size, output


_PREFIX: Final = "registered: "  # with a colon, which no key of a managed region has


class NamedRegions:
    """Finds or maps the memory of registered names. Thread-safe; no request waits while another one maps."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._server = StatusEndpoint(config.server_url)
        self._known: dict[str, Registration] = {}  # the server's last answers

    def find(self, names: Sequence[str], field: str) -> dict[str, Registration]:
        """Return the registrations of names; asks the server each time (60 to 90 µs), unless names are trusted."""
        if not self._config.checks_registrations:
            known = {name: found for name in names if (found := self._known.get(name)) is not None}
            trusted = {name: found for name, found in known.items() if self._registry.live(_name_of(found), field)}
            if len(trusted) == len(names):
                return trusted
        return policy.ask(names, self._server, self._config, field)

    def open(
        self, claim: NamedRegionClaim, found: Mapping[str, Registration], field: str
    ) -> tuple[MappedRegion, MappedMemory]:
        """Return the mapping of a name that :meth:`find` has found, and the part of it that the name covers."""
        registration = policy.resolve(claim, found, self._config, field)

        def open_it() -> MappedRegion:
            return MappedRegion(policy.open_registered(registration, self._config, field, self._registry.check_room))

        mapped = self._registry.obtain(_name_of(registration), open_it, field)
        self._known[claim.name] = registration
        return mapped, mapped.memory.part(registration.offset, registration.byte_size)

    def sweep(self) -> None:
        """Unmap memory that is not registered any more; if the server does not answer, unmap all registered memory."""
        known = dict(self._known)
        mapped = [name for name in list(self._registry.names) if name.startswith(_PREFIX)]
        if not known and not mapped:
            return
        current: Mapping[str, Registration] = {}  # without an answer, nothing counts as registered
        try:
            current = self._server.all()
        finally:
            for name, registration in known.items():
                if current.get(name) != registration:
                    self._known.pop(name, None)
            registered = {_name_of(each) for each in current.values()}
            for name in mapped:
                if name not in registered:
                    self._registry.free_name(name)

    def close(self) -> None:
        """Forget all names and close the connection. The registry keeps the mappings."""
        self._known.clear()
        self._server.close()


def _name_of(registration: Registration) -> str:
    """Return a name for the registry with all properties of a registration, so that it never means other memory."""
    return f"{_PREFIX}{registration.key}/{registration.offset}/{registration.byte_size}"


SWEEP_INTERVAL_S: Final = 5.0
_COLLECT_INTERVAL_S: Final = 0.02
"""The interval for unmapping memory while another thread does so, too."""
_MOST_S: Final = 1.0


class Resolver:
    """Finds or maps the memory of requests; a thread unmaps regions whose owners are gone. Thread-safe."""

    def __init__(self, config: Config, cuda: CudaAccess, pinning: Pinning | None = None) -> None:
        self.registry = Registry(config.max_mapped_bytes, pinning)
        self._config = config
        self._cuda = cuda
        self._named = NamedRegions(config, self.registry)
        self._fetcher = Fetcher(config.handover_s)
        self._lock = threading.Lock()  # guards the start and the end of the sweeper
        self._is_closed = False
        self._sweeper: Repeater | None = None
        self._next_sweep = 0.0

    def open_slot(self, text: str, address: SlotAddress) -> MappedSlot:
        """Return the slot of an address, which ``text`` spells out; map the slot's region if necessary."""
        self._start_sweeper()
        mapped, region = self._managed(address.key, address.token, SLOT_PARAMETER)
        policy.check_slot(region, address.slot, SLOT_PARAMETER)
        return self.registry.add_slot(text, mapped, address.slot)

    def reopen_slot(self, text: str, slot: MappedSlot) -> MappedSlot:
        """Return the slot of an address after its region was removed: the same key may name a new region by now."""
        self.registry.drop(slot.region)
        return self.open_slot(text, parse_address(text))

    def open_further(self, table: Table, own: MappedSlot | None) -> FurtherRegions:
        """Map a table's further regions, mark them as used, and borrow the lent ones; ``own`` is the request's slot."""
        self._start_sweeper()
        if self._cuda.has_retired and self._sweeper is not None:
            self._sweeper.hurry()  # it collects, as this thread must not wait for other calls' work
        found = FurtherRegions([], [], [], [], self.registry, self._cuda)
        seen = {} if own is None else {own.region.segment.identity: 0}
        same = False
        current: dict[str, Registration] | None = None
        try:
            for number, claim in enumerate(table.regions, 1):
                field = f"{DESCRIPTOR_PARAMETER}.regions[{number - 1}]" if own is None else f"regions[{number}]"
                if isinstance(claim, NamedRegionClaim):
                    if current is None:
                        names = [each.name for each in table.regions if isinstance(each, NamedRegionClaim)]
                        current = self._named.find(names, field)
                    mapped, memory = self._named.open(claim, current, field)
                elif isinstance(claim, CudaRegionClaim):
                    fence = None if claim.fence is None else _fence_of(table, claim.fence, own, found)
                    mapped, memory = self._exported(claim, fence, field)
                elif isinstance(claim, CudaDescriptorClaim):
                    mapped, memory = self._fetch(claim, _fence_of(table, claim.fence, own, found)[0], field)
                else:
                    mapped, memory = self._lent(claim, field)
                first = seen.setdefault(mapped.segment.identity, number)
                if first != number:
                    if not isinstance(claim, NamedRegionClaim) or first == 0:
                        raise TableError(field, "memory that the request names before", "every region once")
                    same = True  # two names may cover two parts of one object
                found.take(claim, mapped, memory)
            if found.borrowed:
                _check_lender(own)
            if same:
                _check_parts_are_apart(table, found)
        except BaseException:
            found.unmap_passing()
            found.release()
            raise
        return found

    def sweep(self) -> None:
        """Unmap regions whose owners are gone; MachineError if the server does not answer about names."""
        self.registry.drop_abandoned()
        self._cuda.collect_soon()  # this thread must not wait for GPUs
        self._named.sweep()

    def close(self) -> None:
        """Unmap every region. Twice is fine."""
        with self._lock:
            self._is_closed = True
            sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.stop(_MOST_S)  # it may wait for the server
        self.registry.free_all_names()
        self._named.close()
        collect_all(self._cuda)

    def _managed(self, key: str, token: str, field: str) -> tuple[MappedRegion, ManagedRegion]:
        def open_it() -> MappedRegion:
            return MappedRegion(policy.open_managed(key, token, self._config, self._fetcher, field))

        mapped = self.registry.obtain(f"{key} {token}", open_it, field)
        assert mapped.managed is not None
        return mapped, mapped.managed

    def _lent(self, claim: LentRegionClaim, field: str) -> tuple[MappedRegion, MappedMemory]:
        mapped, region = self._managed(claim.key, claim.token, field)
        policy.check_slot(region, claim.slot, field)
        if claim.byte_size != region.header.byte_size:
            raise TableError(f"{field}.byte_size", str(claim.byte_size), str(region.header.byte_size))
        return mapped, mapped.memory

    def _exported(
        self, claim: CudaRegionClaim, fence: tuple[MappedRegion, int] | None, field: str
    ) -> tuple[MappedRegion, MappedMemory]:
        region, slot = (None, 0) if fence is None else fence

        def open_it() -> MappedRegion:
            managed = None if region is None else region.managed
            held = None if managed is None else (managed, slot)
            return MappedRegion(policy.open_cuda(claim, held, self._config, self._cuda, field), region)

        if _is_passing(claim):
            mapped = self.registry.hold(open_it)
        else:
            mapped = self.registry.obtain(f"cuda: {claim.handle.hex()}", open_it, field)
            mapped.segment.check(claim.byte_size, field)
        return mapped, mapped.memory.part(0, claim.byte_size)

    def _fetch(self, claim: CudaDescriptorClaim, fence: MappedRegion, field: str) -> tuple[MappedRegion, MappedMemory]:
        managed = fence.managed
        if managed is None:
            raise TableError(f"{field}.fence", str(claim.fence), "a managed region")

        def open_it() -> MappedRegion:
            opened = policy.open_cuda_descriptor(claim, managed, self._config, self._cuda, self._fetcher, field)
            return MappedRegion(opened, fence)

        name = f"cuda: {claim.key} {claim.token} {claim.device_uuid} {claim.byte_size}"  # so that it is as claimed
        mapped = self.registry.obtain(name, open_it, field)
        return mapped, mapped.memory

    def _start_sweeper(self) -> None:
        if self._sweeper is not None:
            return
        with self._lock:  # the first requests may come concurrently
            if self._sweeper is None and not self._is_closed:
                self._sweeper = Repeater(self._sweep_quietly, SWEEP_INTERVAL_S, "shm sweeper")

    def _sweep_quietly(self) -> float:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            with contextlib.suppress(MachineError):  # the server did not answer; the next sweep asks again
                self.sweep()
        self._cuda.collect_soon()
        return _COLLECT_INTERVAL_S if self._cuda.has_retired else max(self._next_sweep - time.monotonic(), 0)


def _is_passing(claim: CudaRegionClaim) -> bool:
    """Return whether to unmap memory before the answer: it is lent until then, or no fence shows its owner's end."""
    return claim.is_for_one_request or claim.fence is None


def collect_all(cuda: CudaAccess) -> None:
    """Free and unmap memory as GPUs finish with it; go on after a second, because the process ends soon."""

    def collect() -> None:
        while cuda.collect():  # arrays whose copies end now let go of more memory
            time.sleep(_COLLECT_INTERVAL_S)

    if cuda.has_retired:
        collecting = threading.Thread(target=collect, name="shm retired memory", daemon=True)
        collecting.start()
        collecting.join(_MOST_S)
