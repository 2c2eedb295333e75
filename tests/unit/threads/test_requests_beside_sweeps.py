"""One slot's lease in many threads; requests of clients that come and go while others unmap what they have left."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from shm_backend_utils.errors import RegionGoneError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.registry import Registry
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.address import parse_address
from shm_backend_utils.protocol.spans import Table
from tests.unit.sessions import double, session_of, tensor
from tests.unit.side_by_side import side_by_side
from tests.unit.table_client import Client

pytestmark = pytest.mark.usefixtures("switching_often")
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


def test_first_requests_of_several_threads_start_one_sweeper_which_ends_with_the_session() -> None:
    def sweepers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "shm sweeper"}

    before = sweepers()
    for _ in range(20):
        resolver = Resolver(Config(), CudaAccess())
        side_by_side(*[partial(resolver.open_further, Table({}, {}), None)] * CLIENTS)
        assert len(sweepers() - before) == 1
        resolver.close()
    assert sweepers() <= before


def test_uses_that_begin_and_end_side_by_side_are_all_counted() -> None:
    region, registry = ManagedRegion.create(4096), Registry()
    key, token = region.segment.key, region.header.token.hex()
    mapped = registry.obtain("r", lambda: MappedRegion(ManagedRegion.open(key, token, "region")), "region")

    def work(mapped: MappedRegion) -> None:
        for _ in range(300):
            registry.begin_use(mapped)
            assert mapped.is_in_use
            registry.end_use(mapped)

    side_by_side(*[partial(work, mapped)] * 8)
    assert mapped.use_count == 0
    registry.unregister_all()
    del mapped
    region.segment.unlink()
    region.close()


def test_a_request_that_is_under_way_when_its_session_ends_starts_no_sweeper() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "shm sweeper"}
    resolver = Resolver(Config(), CudaAccess())
    resolver.close()
    address = f"2/m/shmbu-1-{0:016x}/{0:032x}/0"
    with pytest.raises(RegionGoneError):
        resolver.open_slot(address, parse_address(address))
    assert {thread for thread in threading.enumerate() if thread.name == "shm sweeper"} <= before


ROUNDS = 400


@pytest.fixture
def regions() -> Iterator[list[ManagedRegion]]:
    """One region, as its owner has it, and two models."""
    owner = ManagedRegion.create(4096)
    models = [ManagedRegion.open(owner.segment.key, owner.header.token.hex(), "region") for _ in range(2)]
    yield [owner, *models]
    owner.segment.unlink()
    for region in (owner, *models):
        region.close()


def test_one_thread_of_one_process_has_a_slot_at_a_time(regions: list[ManagedRegion]) -> None:
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

    leases = [region.lease(0) for region in regions]
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
