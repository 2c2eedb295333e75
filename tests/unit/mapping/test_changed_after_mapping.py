"""Further regions of a request, and files that are changed after mapping: found out before they are touched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import RegionRefusedError, TableError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint
from shm_backend_utils.memory.segment import MappedSegment, SystemSegment
from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion, MappedSlot
from shm_backend_utils.model.mapping.resolver import FurtherRegions, Resolver
from shm_backend_utils.protocol.claims import NamedRegionClaim, RegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.protocol.table import encode
from shm_backend_utils.testing.faults.at_hand import punch_hole, take_space_beyond
from tests.opened import open_region, open_segment
from tests.unit.claims_of import claim_of_allocation, claim_of_region, resolved, slot_of
from tests.unit.emulated import message_of
from tests.unit.gpu.fakes import SIZE, runtime_that_gives_all_back
from tests.unit.mapping.files import SHM, TOKEN, managed_file, new_key
from tests.unit.sessions import double, say_registered
from tests.unit.table_client import Client

PAGE = 4096
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def segment() -> Iterator[SystemSegment]:
    """Four pages, of which the last is a hole."""
    path = SHM / new_key()
    path.write_bytes(bytes(3 * PAGE))
    os.truncate(path, 4 * PAGE)
    segment = open_segment(path.name, 0, "regions[0]")
    yield segment
    segment.close()
    path.unlink(missing_ok=True)


def path_of(segment: MappedSegment) -> Path:
    return SHM / segment.key


def answer(session: ShmSession, client: Client) -> str:
    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], double)
    if response.has_error():
        return message_of(response)
    assert client.output("Y").tolist() == (2 * X).tolist()
    return ""


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_slot_of_a_region_with_a_hole_is_refused(session: ShmSession, client: Client, is_truncated: bool) -> None:
    assert answer(session, client) == ""
    path = path_of(client.region.segment)
    size = path.stat().st_size
    if is_truncated:
        os.truncate(path, size - PAGE)
        take_space_beyond(path.name, size, PAGE)
        assert path.stat().st_blocks * 512 >= size
    else:
        punch_hole(path.name, size - PAGE, PAGE)
    refusal = f"shm:refused: the request's region refused: its {size} bytes are not there any more: "
    assert answer(session, client) == f"{refusal}it was truncated, or has holes"
    assert client.is_free()


@pytest.mark.parametrize("kind", RegionKind)
def test_a_region_that_its_owner_has_removed_is_served_no_more(session: ShmSession, kind: RegionKind) -> None:
    client = Client(kind=kind)
    assert answer(session, client) == ""
    client.region.segment.unlink()
    assert answer(session, client).startswith("shm:gone: ")
    client.close()


def test_the_last_bytes_of_a_region_that_ends_within_a_block_must_be_there_too() -> None:
    """As a client may make it that is not ours."""
    size = 2 * PAGE + 100
    path = managed_file(new_key(), size)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    region = MappedRegion(open_region(path.name, TOKEN.hex(), "r"))
    slot = MappedSlot(region, 0)
    slot.record.begin(1, encode(Table({}, {})))
    slot.claim(1)
    slot.lease.give_back()
    punch_hole(path.name, 2 * PAGE, PAGE)
    with pytest.raises(RegionRefusedError, match=f"its {size} bytes are not there any more"):
        slot.claim(1)
    path.unlink()


@pytest.mark.parametrize("punched", [0, PAGE], ids=["first", "middle"])
def test_a_segment_may_have_the_holes_that_it_had_and_no_other(segment: SystemSegment, punched: int) -> None:
    segment.check(PAGE, "regions[0]")
    assert segment.space == 3 * PAGE
    punch_hole(path_of(segment).name, punched, PAGE)
    with pytest.raises(RegionRefusedError, match=f"it had memory for {3 * PAGE} bytes, and now has holes"):
        segment.check(PAGE, "regions[0]")


# Sealed memory: seals forbid no holes


FP32 = BY_NAME["FP32"]

MakeRegion = Callable[[], ManagedRegion]


@pytest.fixture
def make_region() -> Iterator[MakeRegion]:
    with contextlib.ExitStack() as at_end:

        def make() -> ManagedRegion:
            region = ManagedRegion.create(PAGE)
            at_end.callback(region.close)
            at_end.callback(region.segment.unlink)
            return region

        yield make


@pytest.fixture
def cuda(allocation: CudaAllocation) -> Iterator[CudaRuntime]:
    """The CUDA of a model's process, which is over before the allocation is freed."""
    assert allocation.address
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def allocation(client_cuda: CudaRuntime) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client_cuda, SIZE, 0)
    yield allocation
    allocation.free()


@pytest.fixture
def resolver(cuda: CudaRuntime) -> Iterator[Resolver]:
    with contextlib.closing(Resolver(Config(), CudaAccess(lambda: cuda))) as resolver:
        yield resolver


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Registration]]:
    key = new_key()
    (SHM / key).write_bytes(bytes(PAGE))
    found = {"in": Registration(key, 0, 64), "out": Registration(key, 8, 64)}
    say_registered(monkeypatch, lambda: found)
    yield found
    (SHM / key).unlink()


IN, OUT = NamedRegionClaim("in"), NamedRegionClaim("out")


def opened(resolver: Resolver, table: Table, own: ManagedRegion) -> FurtherRegions:
    found = resolver.open_further(table, slot_of(resolver, own))
    found.release()
    return found


def x(region: int, offset: int, byte_size: int = 16) -> dict[str, InputSpan]:
    return {"X": InputSpan(FP32, (byte_size // 4,), region, offset, byte_size)}


# Named beside others


def test_own_regions_have_no_name(resolver: Resolver, make_region: MakeRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard link is a name that our prefix does not give away."""
    own, link = make_region(), SHM / new_key()
    os.link(SHM / own.segment.key, link)
    say_registered(monkeypatch, lambda: {"in": Registration(link.name, 0, PAGE)})
    try:
        with pytest.raises(TableError, match="memory that the request names before"):
            opened(resolver, Table({}, {}, (IN,)), own)
    finally:
        link.unlink()


def test_a_lent_region_may_not_be_lent_twice(resolver: Resolver, make_region: MakeRegion) -> None:
    own, lent = make_region(), make_region()
    with pytest.raises(TableError, match=r"regions\[2\].*memory that the request names before"):
        opened(resolver, Table({}, {}, (claim_of_region(lent), claim_of_region(lent))), own)
    assert lent.lease(0).take_back()


@pytest.mark.usefixtures("registered")
def test_tensors_in_the_requests_own_region_are_in_no_other(resolver: Resolver, make_region: MakeRegion) -> None:
    own = make_region()
    spans = {**x(0, 0), "Z": InputSpan(FP32, (4,), 0, 16, 16)}
    assert len(opened(resolver, Table(spans, {"Y": OutputSpan(1, 0, 24)}, (IN, OUT)), own).memories) == 2
    assert len(opened(resolver, Table(x(1, 0), {"Y": OutputSpan(0, 0, 4096)}, (IN, OUT)), own).memories) == 2


@pytest.mark.usefixtures("registered")
def test_parts_of_one_object_may_have_two_names(resolver: Resolver, make_region: MakeRegion) -> None:
    for inputs, region, offset in ((x(1, 0), 2, 8), (x(2, 8), 1, 0), (x(1, 12, 0), 2, 0)):
        table = Table(inputs, {"Y": OutputSpan(region, offset, 16)}, (IN, OUT))
        assert len(opened(resolver, table, make_region()).memories) == 2
    with pytest.raises(TableError, match=r"outputs\.Y"):
        opened(resolver, Table(x(1, 0), {"Y": OutputSpan(2, 7, 16)}, (IN, OUT)), make_region())


# Memory of GPUs


def test_without_a_slot_a_request_borrows_nothing_and_has_no_fence_for_a_gpu(
    resolver: Resolver, make_region: MakeRegion, allocation: CudaAllocation
) -> None:
    lent = make_region()
    with pytest.raises(TableError, match="none: the request has no slot of its own"):
        resolved(resolver, claim_of_region(lent))
    assert lent.lease(0).take_back()
    with pytest.raises(TableError, match=r"regions\.fence.*none: the request has no slot of its own"):
        resolved(resolver, claim_of_allocation(allocation, fence=0))


def test_a_lent_region_fences_a_gpu(resolver: Resolver, make_region: MakeRegion, allocation: CudaAllocation) -> None:
    own, lent = make_region(), make_region()
    claims: tuple[RegionClaim, ...] = (claim_of_region(lent), claim_of_allocation(allocation, fence=1))
    opened(resolver, Table({}, {}, claims), own)
    assert has_users(lent.segment.fileno())
    assert not has_users(own.segment.fileno())


# The end


def test_a_resolver_that_is_closed_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(StatusEndpoint, "close", lambda _: closed.append(True))
    Resolver(Config(), CudaAccess()).close()
    assert closed == [True]
