"""One slot's lease, threads of one process, and others that have a description of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shm_backend_utils.memory.locks import SharedLease, SlotLease, borrow
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.threads.conftest import Run

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


def test_one_thread_of_one_process_has_a_slot_at_a_time(regions: list[ManagedRegion], side_by_side: Run) -> None:
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


def test_the_client_takes_back_only_slots_that_nobody_borrows(regions: list[ManagedRegion], side_by_side: Run) -> None:
    owner, *models = regions
    lease, record = owner.lease(0), owner.record_offset(0)
    borrowers, lock = [0], threading.Lock()

    def change(by: int) -> None:
        with lock:
            borrowers[0] += by

    def work(model: ManagedRegion) -> None:
        for _ in range(ROUNDS):
            borrowed: SharedLease | None = borrow(model.segment.fileno(), record)
            if borrowed is not None:
                change(1)
                change(-1)
                borrowed.give_back()

    def take_back() -> None:
        for _ in range(ROUNDS):
            if lease.take_back():
                assert borrowers[0] == 0, "a borrower is at work"
                lease.give_back()

    side_by_side(take_back, *[lambda model=model: work(model) for model in models * 2])
    assert lease.take_back()
    lease.give_back()


def test_a_region_gives_all_threads_the_same_lease_and_record(side_by_side: Run) -> None:
    region = ManagedRegion.create(4096, slot_count=64)
    seen: list[tuple[int, int, int]] = []

    def work() -> None:
        for slot in range(64):
            seen.append((slot, id(region.lease(slot)), id(region.record(slot))))

    side_by_side(*[work] * 8)
    assert len(set(seen)) == 64
    region.segment.unlink()
    region.close()
