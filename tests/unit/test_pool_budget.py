"""How much memory a pool has: up to its budget, as long as it is used, and what makes way for what."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.client.errors import BudgetError
from shm_backend_utils.errors import CallerError, MachineError
from shm_backend_utils.memory.access import Access
from shm_backend_utils.memory.pool import options as module
from shm_backend_utils.memory.pool.need import Need, region_size
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset
from tests.e2e.eventually import eventually
from tests.unit.taken_regions import REGION, is_there, take, used

SHM = Path("/dev/shm")
MEBIBYTE = 2**20


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have three of the smallest regions."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        yield pool


@pytest.mark.parametrize("byte_size", [1, PAGE_SIZE, PAGE_SIZE + 1, 300_000, MEBIBYTE, MEBIBYTE + 1])
def test_a_region_is_at_most_an_eighth_or_a_page_larger_than_asked_for(byte_size: int) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * MEBIBYTE))) as pool:
        region = used(pool, byte_size)
        assert byte_size <= region.capacity < byte_size + max(PAGE_SIZE, byte_size / 8 + 1)


def test_the_pool_grows_up_to_its_budget(pool: SlotPool) -> None:
    taken = [take(pool) for _ in range(3)]
    assert pool.status.byte_size == pool.status.max_bytes == 3 * REGION
    ticket = pool.request(Need(1), Origin.here("take"))
    assert not ticket.granted.done()
    assert len({region.key for region, _ in taken}) == 3
    pool.withdraw(ticket)


@pytest.mark.parametrize(("byte_size", "slot_count"), [(3 * REGION, 1), (1, 9)])
def test_a_call_that_needs_more_than_the_budget_is_refused_at_once(byte_size: int, slot_count: int) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        with pytest.raises(BudgetError, match=f"but the pool may have {3 * REGION}; raise PoolOptions.max_bytes=...."):
            pool.request(Need(byte_size, slot_count), Origin.here("take"))
        assert pool.status.byte_size == 0


@pytest.mark.parametrize("budget", [REGION, MEBIBYTE, 1_300_000])
def test_a_call_that_needs_the_whole_budget_is_served(budget: int) -> None:
    budget -= budget % PAGE_SIZE
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget))) as pool:
        assert used(pool, budget - data_offset(1, PAGE_SIZE)).byte_size == budget


def test_a_region_has_room_for_similar_calls_if_the_budget_has_it() -> None:
    need = Need(MEBIBYTE - 2 * PAGE_SIZE)
    for budget, pages_less in ((region_size(need), 0), (region_size(need) - PAGE_SIZE, 2)):
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget))) as pool:
            assert used(pool, need.byte_size).byte_size == region_size(need) - pages_less * PAGE_SIZE


def test_idle_regions_make_way_for_a_larger_one_and_no_more_than_must(pool: SlotPool) -> None:
    taken = [take(pool) for _ in range(3)]
    small = [region for region, _ in taken]
    del taken
    large, memory = take(pool, 2 * PAGE_SIZE)
    assert large.byte_size <= 2 * REGION
    assert sum(map(is_there, small)) == 1
    del memory
    largest = used(pool, 3 * REGION - data_offset(1, PAGE_SIZE))
    assert not any(map(is_there, [*small, large]))
    assert pool.status.byte_size == largest.byte_size == 3 * REGION


def test_regions_of_other_groups_make_way_only_if_they_must(pool: SlotPool) -> None:
    other = used(pool, group="triton-shm")
    own, memory = take(pool, 2 * PAGE_SIZE)
    assert is_there(other)
    del memory
    large = used(pool, 3 * REGION - data_offset(1, PAGE_SIZE))
    assert [is_there(region) for region in (other, own, large)] == [False, False, True]


def test_of_the_idle_regions_the_one_that_was_used_least_recently_makes_way(pool: SlotPool) -> None:
    a, b, c = (used(pool, group=group) for group in "abc")
    assert used(pool, group="a") is a
    used(pool, group="d")
    assert [is_there(region) for region in (a, b, c)] == [True, False, True]


def test_the_keys_of_destroyed_regions_that_the_server_knows_are_told_once(pool: SlotPool) -> None:
    known, unknown = used(pool, group="triton-shm"), used(pool)
    known.is_registered = True
    assert pool.take_unregistered() == []
    used(pool, 3 * REGION - data_offset(1, PAGE_SIZE))
    assert (is_there(known), is_there(unknown)) == (False, False)
    assert pool.take_unregistered() == [known.key]
    assert pool.take_unregistered() == []


def test_a_pool_that_is_closed_tells_what_the_server_still_knows(pool: SlotPool) -> None:
    (idle, _), (held, memory) = take(pool), take(pool)
    idle.is_registered = held.is_registered = True
    pool.close()
    assert sorted(pool.take_unregistered()) == sorted([idle.key, held.key])
    assert memory.nbytes


def test_regions_that_nobody_uses_for_long_are_destroyed_and_those_that_are_held_stay() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE, idle_s=0))) as pool:
        held, memory = take(pool)
        idle = used(pool)
        eventually(lambda: not is_there(idle))
        assert is_there(held)
        assert (pool.status.idle, pool.status.byte_size) == (0, memory.nbytes)


def test_a_pool_that_is_closed_has_not_left_what_was_to_make_way_for_a_region_that_was_never_made(
    pool: SlotPool,
) -> None:
    region = used(pool)
    ticket = pool.request(Need(3 * REGION - data_offset(1, PAGE_SIZE), 1), Origin.here("take"))
    try:
        pool.close()
        assert not is_there(region)
    finally:
        region.destroy()
    assert ticket.granted.done()


def test_for_memory_that_the_machine_does_not_have_idle_regions_make_way_and_nothing_is_counted_as_used() -> None:
    space = os.statvfs(SHM)
    more_than_there_is = 2 * space.f_blocks * space.f_frsize
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * more_than_there_is))) as pool:
        idle = used(pool, group="triton-shm")
        with pytest.raises(MachineError, match="/dev/shm has [0-9]+ free"):
            take(pool, more_than_there_is)
        assert not is_there(idle)
        assert pool.status.byte_size == 0
        assert is_there(used(pool))


def test_who_may_open_the_memory_is_as_the_options_say() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE, access=Access(mode=0o660)))) as pool:
        assert (SHM / used(pool).key).stat().st_mode & 0o777 == 0o660


def on_disk() -> int:
    """Return how much this process' regions really have."""
    return sum(path.stat().st_size for path in SHM.glob(f"shmbu-{os.getpid()}-*"))


@pytest.mark.parametrize("is_withdrawn", [False, True], ids=["redeemed", "withdrawn"])
def test_what_makes_way_has_its_part_of_the_budget_until_it_is_gone(pool: SlotPool, is_withdrawn: bool) -> None:
    before = on_disk()
    large = used(pool, 3 * REGION - data_offset(1, PAGE_SIZE), group="other")
    tickets = [pool.request(Need(1), Origin.here(name)) for name in ("first", "second", "third")]
    granted = [ticket for ticket in tickets[1:] if ticket.granted.done()]
    taken = [pool.redeem(ticket) for ticket in granted]  # the first one's thread sleeps meanwhile
    assert on_disk() - before <= 3 * REGION
    if is_withdrawn:
        pool.withdraw(tickets[0])
    else:
        taken.append(pool.redeem(tickets[0]))
    assert not is_there(large)
    assert all(ticket.granted.done() for ticket in tickets)
    taken += [pool.redeem(ticket) for ticket in tickets[1:] if ticket not in granted]
    assert on_disk() - before == pool.status.byte_size == len(taken) * REGION


MACHINE = 10 * 2**30
DEV_SHM = 2**26


@pytest.mark.parametrize(
    ("region", "expected"), [("auto", MACHINE // 2), ("sealed", MACHINE // 2), ("system", DEV_SHM // 2)]
)
def test_without_a_budget_a_client_takes_as_much_as_it_leaves(
    monkeypatch: pytest.MonkeyPatch, region: RegionName, expected: int
) -> None:
    """In a container as docker starts it: much memory, and 64 MiB in /dev/shm."""
    taken = 0
    monkeypatch.setattr(module, "available_bytes", lambda: MACHINE - taken)
    monkeypatch.setattr(module, "memory_bytes", lambda: MACHINE)
    monkeypatch.setattr(module, "free_bytes", lambda: DEV_SHM - taken)
    for taken in (0, expected // 3, expected):
        assert PoolOptions(region=region).budget_bytes(taken) == max(expected, taken + (2 * expected - taken) // 64)


def test_a_client_that_holds_more_than_is_left_goes_on_with_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 500 * 2**20)
    held = 600 * 2**20
    assert PoolOptions(region="sealed").budget_bytes(held) > held + 2**22


@pytest.mark.parametrize("count", [1, 2, 8])
def test_several_clients_leave_as_much_as_each_has(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pools: list[SlotPool] = []
    machine = 90 * REGION
    monkeypatch.setattr(module, "available_bytes", lambda: machine - sum(pool._inventory.made_bytes for pool in pools))
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            pools.append(SlotPool(PoolOptions()))
            stack.callback(pools[-1].close)
        held: list[object] = []
        for _ in range(90):
            tickets = [(pool, pool.request_at_once(Need(1, group="alone"), Origin.here("a call"))) for pool in pools]
            held += [pool.redeem(ticket) for pool, ticket in tickets if ticket is not None]
        assert [pool.status.held for pool in pools] == [90 // (count + 1)] * count
        waiting = pools[0].request(Need(1, group="alone"), Origin.here("a call"))
        assert not waiting.granted.done()
        machine *= 2  # others have let go of some, which the pool looks for
        waiting.granted.result(60)
        pools[0].withdraw(waiting)


@pytest.mark.parametrize("wrong", ["memfd", "AUTO", "", None, True])
def test_another_kind_of_memory_is_refused_with_those_that_there_are(wrong: Any) -> None:
    with pytest.raises(CallerError, match=f"PoolOptions.region is {wrong!r}; expected 'auto', 'system', 'sealed'"):
        PoolOptions(region=wrong)


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_have_gone(wanted: Any) -> None:
    with pytest.raises(CallerError, match="huge_pages went with 0.3: all memory has ordinary pages; leave it out"):
        PoolOptions(huge_pages=wanted)
