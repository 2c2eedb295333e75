"""An interrupt while a region changes hands: nobody has the region then, and the pool finds it again."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import Need, SlotPool, region_size
from shm_backend_utils.memory.pool.rows import RowBlocks
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset

SHM = Path("/dev/shm")
NEED = Need(1)
REGION = region_size(NEED)
LONG_S = 30.0


@pytest.fixture(autouse=True)
def _unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody keep what is raised in finalizers: it refers to all that they have in their hands."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def interrupted_at(step: int, functions: set[str], work: Callable[[], object]) -> bool:
    """Do work that is interrupted at the n-th instruction of some functions; return whether it came to that."""
    count = 0

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "/memory/pool/" not in frame.f_code.co_filename or frame.f_code.co_name not in functions:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == step:
                raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    return count >= step


def take(pool: SlotPool, need: Need = NEED) -> tuple[SlotRegion, Any]:
    return pool.redeem(pool.request(need, "taker"))


@contextlib.contextmanager
def pool_of(count: int = 1) -> Iterator[SlotPool]:
    """Make a pool that may have so many regions, all of them idle."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=count * REGION))) as pool:
        held = [take(pool) for _ in range(count)]
        del held
        yield pool


def check_each_is_had_once(pool: SlotPool, count: int = 1) -> None:
    """Check that as many regions can be taken as there are, and each of them once."""
    assert (pool.status.held, pool.status.idle, pool.status.byte_size) == (0, count, count * REGION)
    taken = [pool.take_idle(NEED, number) for number in range(count)]
    assert len({each[0].key for each in taken if each is not None}) == count
    assert pool.take_idle(NEED, "one too many") is None


def take_and_give_back(pool: SlotPool) -> None:
    assert pool.take_idle(NEED, "taker") is not None


def ask_and_give_up(pool: SlotPool) -> None:
    pool.withdraw(pool.request(NEED, "taker"))


PLACES: dict[str, tuple[Callable[[SlotPool], object], set[str]]] = {
    "taking": (take_and_give_back, {"take_idle"}),
    "giving back": (take_and_give_back, {"_give_back", "put_back"}),
    "granting": (ask_and_give_up, {"_serve", "_grant", "take"}),
    "sorting": (ask_and_give_up, {"_sort_returned", "care_for", "put_back", "_take_back"}),
}


@pytest.mark.parametrize(("work", "functions"), PLACES.values(), ids=list(PLACES))
def test_a_region_that_an_interrupt_has_lost_is_found(work: Callable[[SlotPool], object], functions: set[str]) -> None:
    step = 0
    while True:
        step += 1
        with pool_of() as pool:
            if not interrupted_at(step, functions, lambda: work(pool)):
                break
            pool._keep_house()
            check_each_is_had_once(pool)
    assert step > 5


def lose(pool: SlotPool, need: Need = NEED, prepare: Callable[[SlotRegion], object] = lambda _: None) -> str:
    """Take a region, and lose it as an interrupt at the beginning of its finalizer does; return its key."""

    def interrupted(pool: SlotPool, reference: Any) -> None:
        pool._watched.pop(id(reference))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotPool, "_give_back", interrupted)
        region, memory = pool.take_idle(need, "taker") or take(pool, need)
        prepare(region)
        del memory
    return region.key


def test_who_waits_gets_what_an_interrupt_has_lost() -> None:
    with pool_of() as pool:
        key = lose(pool)
        assert pool.take_idle(NEED, "another") is None
        found = pool.request(NEED, "waiter").granted.result(LONG_S).region
        assert found is not None
        assert found.key == key


def test_what_somebody_still_has_in_his_hands_is_not_lost() -> None:
    with pool_of() as pool:
        kept: list[KeyboardInterrupt] = []

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shm_backend_utils.memory.pool.pool.np.frombuffer", interrupted)
            try:
                pool.take_idle(NEED, "taker")
            except KeyboardInterrupt as error:
                kept.append(error)  # whose frames have the region
        pool._keep_house()
        assert pool.take_idle(NEED, "another") is None
        kept.clear()
        pool._keep_house()
        check_each_is_had_once(pool)


def test_what_is_had_promised_or_idle_is_not_lost() -> None:
    with pool_of(3) as pool:
        _, memory = take(pool)
        ticket = pool.request(NEED, "waiter")
        for _ in range(3):
            pool._keep_house()
        assert (pool.status.held, pool.status.idle) == (2, 1)
        idle = pool.take_idle(NEED, "another")
        assert idle is not None
        assert pool.take_idle(NEED, "one too many") is None
        assert pool.redeem(ticket)[0] not in (idle[0], None)
        del memory, idle
        pool._keep_house()
        check_each_is_had_once(pool, 3)


def doubt(region: SlotRegion) -> None:
    region.slots[0].is_in_doubt = True


def test_a_lost_region_in_which_a_model_executes_goes_into_quarantine() -> None:
    with pool_of() as pool:
        key = lose(pool, prepare=doubt)
        fd = os.open(SHM / key, os.O_RDWR)
        model = SlotLease(fd, record_offset(0, PAGE_SIZE))
        assert model.take()
        pool._keep_house()
        assert (pool.status.quarantined, pool.take_idle(NEED, "another")) == (1, None)
        pool._keep_house()
        assert pool.status.quarantined == 1
        model.give_back()
        os.close(fd)
        pool._keep_house()
        check_each_is_had_once(pool)


def spoil(region: SlotRegion) -> None:
    region.is_spoiled = region.is_registered = True


def test_a_lost_region_that_is_spoiled_is_removed() -> None:
    with pool_of() as pool:
        key = lose(pool, prepare=spoil)
        pool._keep_house()
        assert not (SHM / key).exists()
        assert (pool.status.byte_size, pool.take_unregistered()) == (0, [key])


def test_a_lost_block_of_rows_is_found_although_its_calls_are_remembered() -> None:
    need = Need(1, 2)
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=region_size(need)))) as pool:
        blocks: RowBlocks[int] = RowBlocks()

        def begin(region: SlotRegion) -> None:
            row = blocks.begin("alike", region, whole[0], [0, 1])
            assert blocks.take("alike") is not None
            del row

        whole: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlotPool, "_give_back", lambda pool, reference: pool._watched.pop(id(reference)))
            region, memory = take(pool, need)
            whole.append(memory)
            del memory
            begin(region)
            whole.clear()
        del region
        assert blocks.take("alike") is None
        pool._keep_house()
        assert (pool.status.held, pool.status.idle) == (0, 1)
        assert pool.take_idle(need, "another") is not None


def test_looking_for_what_is_lost_never_gives_one_region_to_two() -> None:
    thread_count, rounds = 4, 500
    is_over = threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with pool_of(3) as pool:

            def look() -> None:
                while not is_over.is_set():
                    pool._keep_house()

            def work(number: int) -> int:
                done = 0
                for _ in range(rounds):
                    taken = pool.take_idle(NEED, number)
                    if taken is None:
                        ticket = pool.request(NEED, number)
                        ticket.granted.result(LONG_S)
                        taken = pool.redeem(ticket)
                    memory = taken[1]
                    memory[-8:] = number
                    done += bool((memory[-8:] == number).all())
                    del memory, taken
                return done

            looking = threading.Thread(target=look)
            looking.start()
            with concurrent.futures.ThreadPoolExecutor(thread_count) as threads:
                assert list(threads.map(work, range(thread_count))) == [rounds] * thread_count
            is_over.set()
            looking.join()
            check_each_is_had_once(pool, 3)
    finally:
        is_over.set()
        sys.setswitchinterval(before)
