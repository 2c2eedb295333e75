"""The client's regions: how they are given back and used again, how much memory they have, and which make way."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import CallerError, ClosedError, MachineError
from shm_backend_utils.memory.descriptors import PRIVATE, Access, Descriptor
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool import options as module
from shm_backend_utils.memory.pool.inventory import Need, region_size
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import Slot, SlotRegion
from shm_backend_utils.protocol.layout import MAX_RECORD_BYTE_SIZE, MAX_SLOT_COUNT, PAGE_SIZE, data_offset
from tests.e2e.eventually import eventually
from tests.unit.taken_regions import REGION, SHM, Memory, is_there, take, used

MEBIBYTE = 2**20


def pool_of(max_bytes: int | None = None, **options: Any) -> contextlib.closing[SlotPool]:
    return contextlib.closing(SlotPool(PoolOptions(max_bytes=max_bytes, **options)))


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with pool_of(3 * REGION) as pool:
        yield pool


def resident_bytes(inode: int) -> int:
    """Return how much of the mappings of a file is in this process' page tables."""
    resident, is_of_the_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_of_the_file = f" {inode} " in line
        elif is_of_the_file and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


DERIVED: list[Callable[[Any], Any]] = [
    lambda memory: memory,
    lambda memory: memory[10:],
    lambda memory: memory[10:][5:].reshape(-1, 1)[::2],
    lambda memory: memory.view(np.float32)[1:].T,
    lambda memory: np.ndarray((4,), np.int64, buffer=memory, offset=64),
    lambda memory: np.ndarray((4,), np.int64, buffer=memory)[1:],
    lambda memory: memoryview(memory[1:]),
    lambda memory: np.frombuffer(memory[8:], np.int16),
    lambda memory: np.from_dlpack(memory[3:]),
    iter,
]


@pytest.mark.parametrize("derived", DERIVED, ids=range(10))
def test_whatever_is_made_of_the_memory_holds_the_region(pool: SlotPool, derived: Callable[[Memory], Any]) -> None:
    _, memory = take(pool)
    last = derived(memory)
    del memory
    assert (pool.status.held, pool.status.idle) == (1, 0)
    del last
    assert (pool.status.held, pool.status.idle) == (0, 1)


def test_the_smallest_region_that_fits_is_used_by_calls_of_about_the_same_size() -> None:
    with pool_of(4 * MEBIBYTE) as pool:
        taken = [take(pool, pages * PAGE_SIZE) for pages in (8, 2, 4)]
        regions = [region for region, _ in taken]
        del taken
        assert used(pool, 3 * PAGE_SIZE) is regions[2]
        assert used(pool, MEBIBYTE - 2 * PAGE_SIZE) is used(pool, MEBIBYTE)


def test_of_several_idle_regions_the_one_that_was_used_last_is_used(pool: SlotPool) -> None:
    taken = [take(pool) for _ in range(3)]
    regions = [region for region, _ in taken]
    for index in (1, 2, 0):
        taken[index] = (regions[index], np.empty(0, np.uint8))
        pool.status  # noqa: B018  # looks at what was given back
    assert used(pool) is regions[0]
    assert used(pool) is regions[0]
    held, _memory = take(pool)
    assert held is regions[0]
    assert used(pool) is regions[2]


def test_what_a_region_has_on_gpus_goes_with_its_memory_when_the_pool_was_closed(pool: SlotPool) -> None:
    region, memory = take(pool)
    on_gpu = np.empty(1)
    gone = weakref.ref(on_gpu)
    region.device_memory[0] = on_gpu
    pool.close()
    del region, on_gpu
    assert gone() is not None
    del memory
    assert gone() is None


@pytest.mark.parametrize("prefault", [True, False])
def test_new_memory_is_in_the_page_tables_at_once_only_if_asked_for(prefault: bool) -> None:
    with pool_of(prefault=prefault, access=Access(mode=0o660)) as pool:
        region, memory = take(pool, MEBIBYTE)
        file = (SHM / region.key).stat()
        assert (resident_bytes(file.st_ino) >= MEBIBYTE) is prefault
        assert memory.nbytes > MEBIBYTE
        assert file.st_mode & 0o777 == 0o660, "who may open it is as the options say"


def test_a_region_is_at_most_an_eighth_or_a_page_larger_than_asked_for_if_the_budget_has_it() -> None:
    for byte_size in (1, PAGE_SIZE, PAGE_SIZE + 1, 300_000, MEBIBYTE, MEBIBYTE + 1):
        with pool_of(4 * MEBIBYTE) as pool:
            region = used(pool, byte_size)
            assert byte_size <= region.capacity < byte_size + max(PAGE_SIZE, byte_size / 8 + 1)
    for budget in (REGION, MEBIBYTE, 317 * PAGE_SIZE):
        with pool_of(budget) as pool:
            assert used(pool, budget - data_offset(1, PAGE_SIZE)).byte_size == budget
    need = Need(MEBIBYTE - 2 * PAGE_SIZE)
    for budget, pages_less in ((region_size(need), 0), (region_size(need) - PAGE_SIZE, 2)):
        with pool_of(budget) as pool:
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


def test_of_the_idle_regions_the_one_that_was_used_least_recently_makes_way(pool: SlotPool) -> None:
    a, b, c = (used(pool, group=group) for group in "abc")
    assert used(pool, group="a") is a
    used(pool, group="d")
    assert [is_there(region) for region in (a, b, c)] == [True, False, True]
    pool.drop_idle()
    other = used(pool, group="triton-shm")
    own, memory = take(pool, 2 * PAGE_SIZE)
    assert is_there(other), "regions of other groups make way only if they must"
    del memory
    large = used(pool, 3 * REGION - data_offset(1, PAGE_SIZE))
    assert [is_there(region) for region in (other, own, large)] == [False, False, True]


def test_regions_that_nobody_uses_for_long_are_destroyed_and_those_that_are_held_stay() -> None:
    with pool_of(MEBIBYTE, idle_s=0) as pool:
        held, memory = take(pool)
        idle = used(pool)
        eventually(lambda: not is_there(idle))
        assert is_there(held)
        assert (pool.status.idle, pool.status.byte_size) == (0, memory.nbytes)


def test_for_memory_that_the_machine_does_not_have_idle_regions_make_way_and_nothing_is_counted_as_used() -> None:
    space = os.statvfs(SHM)
    more_than_there_is = 2 * space.f_blocks * space.f_frsize
    with pool_of(2 * more_than_there_is) as pool:
        idle = used(pool, group="triton-shm")
        with pytest.raises(MachineError, match="/dev/shm has [0-9]+ free"):
            take(pool, more_than_there_is)
        assert not is_there(idle)
        assert pool.status.byte_size == 0
        assert is_there(used(pool))


def test_without_a_budget_a_client_takes_as_much_as_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container as docker starts it: much memory, and 64 MiB in /dev/shm."""
    machine, dev_shm, taken = 10 * 2**30, 2**26, 0
    monkeypatch.setattr(module, "available_bytes", lambda: machine - taken)
    monkeypatch.setattr(module, "memory_bytes", lambda: machine)
    monkeypatch.setattr(module, "free_bytes", lambda: dev_shm - taken)
    kinds: dict[RegionName, int] = {"auto": machine // 2, "sealed": machine // 2, "system": dev_shm // 2}
    for region, most in kinds.items():
        for taken in (0, most // 3, most):
            assert PoolOptions(region=region).budget_bytes(taken) == max(most, taken + (2 * most - taken) // 64)
    taken, held = machine - 500 * 2**20, 600 * 2**20  # it goes on with small calls
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
            waiters = [(pool, pool.request_at_once(Need(1, group="alone"), "a call")) for pool in pools]
            held += [pool.take_granted(waiter) for pool, waiter in waiters if waiter is not None]
        assert [pool.status.held for pool in pools] == [90 // (count + 1)] * count
        waiting = pools[0].request(Need(1, group="alone"), "a call")
        assert not waiting.granted.done()
        machine *= 2  # others have let go of some, which the pool looks for
        waiting.granted.result(60)
        pools[0].withdraw(waiting)


def test_another_kind_of_memory_is_refused_with_those_that_there_are() -> None:
    wrong: Any
    for wrong in ("memfd", "AUTO", "", None, True):
        with pytest.raises(CallerError, match=f"PoolOptions.region is {wrong!r}; expected 'auto', 'system', 'sealed'"):
            PoolOptions(region=wrong)
    for wrong in (True, False):
        with pytest.raises(CallerError, match="huge_pages is gone: all memory has ordinary pages; leave it out"):
            PoolOptions(huge_pages=wrong)


def region_of(slots: int = 1, record: int = PAGE_SIZE) -> SlotRegion:
    return SlotRegion(PAGE_SIZE, slots, record, PRIVATE)


@pytest.mark.parametrize(
    ("option", "least", "too_little"),
    [
        ("max_bytes", 1, 0),
        ("max_device_bytes", 1, 0),
        ("max_batch_bytes", 0, -1),
        ("idle_s", 0, -0.1),
        ("idle_s", 0, float("nan")),
        ("head_room", 1, 0.99),
        ("head_room", 1, float("nan")),
        ("stream_guess_bytes", 0, -1),
    ],
)
def test_an_option_may_be_as_little_as_makes_sense_and_no_less(option: str, least: Any, too_little: Any) -> None:
    assert getattr(PoolOptions(**{option: least}), option) == least
    with pytest.raises(CallerError, match=f"PoolOptions.{option} is {too_little}"):
        PoolOptions(**{option: too_little})


def test_a_region_of_too_many_or_odd_slots_is_not_made_and_the_largest_can_be() -> None:
    for slots in (0, -1, MAX_SLOT_COUNT + 1):
        with pytest.raises(ValueError, match=f"a region of {slots} slots was asked for"):
            ManagedRegion.create(100, slots)
    for record in (0, -PAGE_SIZE, PAGE_SIZE + 8, MAX_RECORD_BYTE_SIZE + PAGE_SIZE):
        with pytest.raises(ValueError, match=f"records of {record} bytes were asked for"):
            ManagedRegion.create(100, 1, record_byte_size=record)
    for slots, record in ((MAX_SLOT_COUNT, PAGE_SIZE), (1, MAX_RECORD_BYTE_SIZE)):
        region = region_of(slots, record)
        assert region.slots[-1].record.room == record // 2
        region.destroy()


def test_a_model_that_begins_just_before_the_slot_is_fenced_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, fence = region_of().slots[0], Slot.fence
    slot.begin(b"")
    monkeypatch.setattr(Slot, "fence", lambda slot: (slot.record.start(1), fence(slot))[1])
    assert [slot.fence_unstarted(), slot.fence_unstarted()] == [False, False]


def test_a_slot_of_a_destroyed_region_is_closed_and_never_in_anybodys_way() -> None:
    region, given = region_of(), list[Descriptor]()
    region.on_destroy = lambda _, descriptor: given.append(descriptor)
    slot = region.slots[0]
    assert (slot.begin(b""), slot.was_left, slot.is_completed, slot.is_at_rest) == (1, False, False, True)
    region.destroy()
    region.destroy()
    for use in (lambda: slot.record, lambda: slot.begin(b""), lambda: slot.is_at_rest):
        with pytest.raises(ClosedError, match="this client"):
            use()
    assert (bytes(slot.results), slot.was_left, slot.is_completed, slot.reclaim()) == (b"", False, False, False)
    slot.give_up()
    slot.release_frame(7)
    assert slot.generation == 1
    (descriptor,) = given
    assert os.fstat(descriptor.fileno()).st_nlink == 0


def test_idle_regions_are_not_destroyed_for_a_call_that_cannot_have_enough_nor_those_of_another_kind_first() -> None:
    with pool_of(10 * PAGE_SIZE) as pool:
        _, held = take(pool, 4 * PAGE_SIZE, group="other")
        idle = used(pool, 100)
        assert not pool.request(Need(6 * PAGE_SIZE), "test").granted.done()
        assert is_there(idle)
        assert (pool.status.idle, held.nbytes > 0) == (1, True)
    with pool_of(20 * PAGE_SIZE) as pool:
        other, own = used(pool, 100, group="other"), used(pool, 100)  # the other one is idle for longer
        assert take(pool, 2 * PAGE_SIZE)[1].nbytes
        assert (is_there(other), is_there(own)) == (True, False)
