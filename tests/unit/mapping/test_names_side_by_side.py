"""Requests, names and sweeps side by side: nobody waits for another one, and nobody gets what is not his."""

from __future__ import annotations

import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.errors import RegionGoneError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.memory import HostMemory, MappedMemory
from shm_backend_utils.model.mapping.registry import Registry
from shm_backend_utils.model.mapping.resolver import NamedRegions, Resolver
from shm_backend_utils.protocol.claims import NamedRegionClaim
from shm_backend_utils.protocol.parameters import parse_address
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.faults.at_hand import punch_hole
from tests.opened import open_region
from tests.unit.sessions import double, say_registered, session_of, tensor
from tests.unit.side_by_side import side_by_side
from tests.unit.table_client import Client

pytestmark = pytest.mark.usefixtures("switching_often")
SHM: Final = Path("/dev/shm")
PAGE: Final = 4096
CLAIM: Final = NamedRegionClaim("mine")
FIELD: Final = "regions[1]"

Registered = dict[str, Registration]
Make = Callable[[int], str]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Registered:
    found: Registered = {}
    say_registered(monkeypatch, lambda: found)
    return found


@pytest.fixture
def regions(registered: Registered) -> Iterator[NamedRegions]:
    registry = Registry()
    with closing(NamedRegions(Config(), registry)) as regions:
        yield regions
    registry.free_all_names()


@pytest.fixture
def objects() -> Iterator[Make]:
    made: list[Path] = []

    def make(value: int) -> str:
        made.append(SHM / f"beside-{os.getpid()}-{secrets.token_hex(8)}")
        made[-1].write_bytes(bytes([value]) * PAGE)
        return f"/{made[-1].name}"

    yield make
    for path in made:
        path.unlink()


def value_of(opened: tuple[Any, MappedMemory]) -> int:
    memory = opened[1]
    assert isinstance(memory, HostMemory)
    return int(memory.bytes()[0])


def opened_with(regions: NamedRegions, registration: Registration) -> tuple[Any, MappedMemory]:
    return regions.open(CLAIM, {"mine": registration}, FIELD)


def test_a_region_that_takes_long_to_map_holds_up_no_other_name(
    registered: Registered, regions: NamedRegions, objects: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Registration(objects(1), 0, PAGE)
    registered["other"] = Registration(objects(2), 0, PAGE)
    begun, may_go, open_registered = threading.Event(), threading.Event(), policy.open_registered

    def open_slowly(registration: Registration, *more: Any) -> Any:
        if registration == slow:
            begun.set()
            assert may_go.wait(10)
        return open_registered(registration, *more)

    monkeypatch.setattr(policy, "open_registered", open_slowly)
    thread = threading.Thread(target=opened_with, args=(regions, slow))
    thread.start()
    try:
        assert begun.wait(10)
        other: list[int] = []
        honest = threading.Thread(
            target=lambda: other.append(value_of(regions.open(NamedRegionClaim("other"), dict(registered), FIELD)))
        )
        honest.start()
        honest.join(10)
        assert other == [2]
    finally:
        may_go.set()
        thread.join()


def test_one_who_maps_late_has_what_he_was_told_until_the_next_sweep(
    registered: Registered, regions: NamedRegions, objects: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (Registration(objects(value), 0, PAGE) for value in (1, 2))
    registered["mine"] = new
    open_registered, values = policy.open_registered, []

    def be_overtaken(registration: Registration, *more: Any) -> Any:
        monkeypatch.setattr(policy, "open_registered", open_registered)
        values.append(value_of(opened_with(regions, new)))
        return open_registered(registration, *more)

    monkeypatch.setattr(policy, "open_registered", be_overtaken)
    values.append(value_of(opened_with(regions, old)))
    assert values == [2, 1]
    assert regions._registry.mapped()[1] == 2
    regions.sweep()
    assert regions._registry.mapped()[1] == 1
    assert value_of(opened_with(regions, new)) == 2
    registered.clear()
    regions.sweep()
    assert regions._registry.mapped()[1] == 0


def test_a_name_of_a_longer_part_gets_its_space(regions: NamedRegions, objects: Make) -> None:
    key = objects(1)
    os.truncate(SHM / key[1:], 3 * PAGE)  # with holes
    opened_with(regions, Registration(key, 0, PAGE))
    opened_with(regions, Registration(key, 0, 3 * PAGE))
    assert (SHM / key[1:]).stat().st_blocks * 512 == 3 * PAGE


def test_holes_in_a_part_that_was_mapped_later_are_noticed(regions: NamedRegions, objects: Make) -> None:
    key = objects(1)
    path = SHM / key[1:]
    os.truncate(path, 3 * PAGE)
    first, second = Registration(key, 0, PAGE), Registration(key, 2 * PAGE, PAGE)
    opened_with(regions, first)
    opened_with(regions, second)
    punch_hole(path.name, 2 * PAGE, PAGE)
    opened_with(regions, second)
    assert path.stat().st_blocks * 512 == 2 * PAGE, "it has its memory again"


def test_a_name_whose_object_cannot_be_mapped_goes(regions: NamedRegions) -> None:
    with pytest.raises(RegionGoneError):
        opened_with(regions, Registration("/beside-nobody", 0, PAGE))
    assert regions._known == {}


CLIENTS, REQUESTS = 4, 12


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters={"SHM_MAX_MAPPED_BYTES": "20000000"}) as made:
        yield made


def test_sweeps_take_no_memory_from_a_request_and_leave_none(session: ShmSession) -> None:
    context = session._context
    assert context is not None
    resolver = context.resolver
    is_over = threading.Event()
    running = [CLIENTS]

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(REQUESTS):
                client = Client(slots=2)
                for slot in (0, 1, 0):
                    x = np.full(chance.randrange(1, 50), seed, np.float32)
                    (response,) = session.serve([client.request({"X": x}, {"Y": x.nbytes}, slot)], double)
                    assert response.error() is None
                    assert client.output("Y", slot).tolist() == (x * 2).tolist()
                client.close()
        finally:
            running[0] -= 1
            if not running[0]:
                is_over.set()

    def sweep() -> None:
        while not is_over.is_set():
            resolver.sweep()

    def drop_the_oldest() -> None:
        while not is_over.is_set():
            resolver.registry._drop_oldest_idle()

    side_by_side(sweep, drop_the_oldest, *[lambda seed=seed: come_and_go(seed) for seed in range(1, CLIENTS + 1)])
    resolver.sweep()
    assert resolver.registry.mapped() == (0, 0)


def sweepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shm sweeper"}


def test_first_requests_of_several_threads_start_one_sweeper_which_ends_with_the_session() -> None:
    before, address = sweepers(), f"2/m/shmbu-1-{0:016x}/{0:032x}/0"
    for _ in range(20):
        resolver = Resolver(Config(), CudaAccess())
        side_by_side(*[partial(resolver.open_further, Table({}, {}), None)] * CLIENTS)
        assert len(sweepers() - before) == 1
        resolver.close()
    with pytest.raises(RegionGoneError):  # a request that is under way when the session ends
        resolver.open_slot(address, parse_address(address))
    assert sweepers() <= before


def test_uses_that_begin_and_end_side_by_side_are_all_counted() -> None:
    region, registry = ManagedRegion.create(4096), Registry()
    key, token = region.segment.key, region.header.token.hex()
    mapped = registry.obtain("r", lambda: MappedRegion(open_region(key, token, "region")), "region")

    def work(mapped: MappedRegion) -> None:
        for _ in range(300):
            registry.begin_use(mapped)
            assert mapped.is_in_use
            registry.end_use(mapped)

    side_by_side(*[partial(work, mapped)] * 8)
    assert mapped.use_count == 0
    registry.free_all_names()
    del mapped
    region.segment.unlink()
    region.close()


ROUNDS = 400


@pytest.fixture
def three_regions() -> Iterator[list[ManagedRegion]]:
    owner = ManagedRegion.create(4096)
    models = [open_region(owner.segment.key, owner.header.token.hex(), "region") for _ in range(2)]
    yield [owner, *models]
    owner.segment.unlink()
    for region in (owner, *models):
        region.close()


def test_one_thread_of_one_process_has_a_slot_at_a_time(three_regions: list[ManagedRegion]) -> None:
    inside, taken = [0], [0] * 9
    held = threading.Lock()

    def work(number: int, lease: SlotLease, take: Callable[[], bool]) -> None:
        for _ in range(ROUNDS):
            if take():
                assert held.acquire(blocking=False), "two have the lease"
                inside[0] += 1
                assert inside[0] == 1
                taken[number] += 1
                inside[0] -= 1
                held.release()
                lease.give_back()

    leases = [region.lease(0) for region in three_regions]
    works = []
    for number in range(9):
        lease = leases[number % 3]
        take = lease.take_back if number % 3 == 0 else lease.take
        works.append(lambda number=number, lease=lease, take=take: work(number, lease, take))
    side_by_side(*works)
    assert sum(taken) > 0
    for lease in leases:
        assert lease.take_back()
        lease.give_back()
