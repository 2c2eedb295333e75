"""Finalizers and interrupts, which come in any thread and at any point: no region, and no registration, is lost."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shm_backend_utils
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.pool import inventory as inventory_module
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.inventory import Need, region_size
from shm_backend_utils.memory.pool.options import PoolOptions, PoolStatus
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.repeater import Repeater
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.e2e.eventually import eventually
from tests.unit.taken_regions import REGION, is_there, own_files, take, used

LONG_S = 30.0


class Disruptive:
    """A holder that does something else while it is put into words, when nobody else may touch the pool."""

    def __init__(self, disrupt: Callable[[], object]) -> None:
        self._disrupt = disrupt

    def __str__(self) -> str:
        self._disrupt()
        return "disrupt"


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        yield pool


def test_memory_that_is_collected_while_the_pool_is_locked_comes_back(pool: SlotPool) -> None:
    cycle: list[Any] = [take(pool, holder=Disruptive(gc.collect))]
    cycle.append(cycle)
    del cycle
    waiter = pool.request(Need(1), "wait")
    waiter.granted.result(LONG_S)


def test_a_pool_that_is_abandoned_removes_its_regions_and_fails_who_waits(pool: SlotPool) -> None:
    _, memory = take(pool)
    waiter = pool.request(Need(1), "wait")
    pool.abandon()
    with pytest.raises(ClosedError):
        waiter.granted.result(LONG_S)
    assert own_files() == set()
    memory[-1] = 42
    assert memory[-1] == 42
    pool.abandon()
    with pytest.raises(ClosedError):
        pool.request(Need(1), "take")
    SlotPool(PoolOptions()).abandon()  # one that never had memory


def abandon_in_a_thread(pool: SlotPool) -> None:
    other = threading.Thread(target=pool.abandon)
    other.start()
    other.join()


@pytest.mark.parametrize("abandon", [abandon_in_a_thread, SlotPool.abandon])
def test_a_pool_abandoned_while_locked_is_closed_then(pool: SlotPool, abandon: Callable[[SlotPool], None]) -> None:
    held = take(pool, holder=Disruptive(lambda: abandon(pool)))
    waiter = pool.request(Need(1), "wait")
    with pytest.raises(ClosedError):
        waiter.granted.result(LONG_S)
    eventually(lambda: own_files() == set())
    assert held[1].nbytes


def test_a_handler_of_the_log_may_ask_for_the_pools_figures(pool: SlotPool) -> None:
    figures: list[PoolStatus] = []
    handler, logger = logging.Handler(), logging.getLogger("shm_backend_utils")
    handler.emit = lambda record: figures.append(pool.status)  # type: ignore[method-assign]
    held = take(pool)
    logger.addHandler(handler)
    pool.request(Need(1), "wait")
    logger.removeHandler(handler)
    assert [each.held for each in figures] == [1]
    assert held[1].nbytes


@pytest.mark.parametrize("end", [SlotPool.close, SlotPool.abandon])
def test_a_pool_that_has_ended_has_no_thread(end: Callable[[SlotPool], None]) -> None:
    before = threading.enumerate()
    pool = SlotPool(PoolOptions(max_bytes=REGION))
    take(pool)
    (thread,) = [each for each in threading.enumerate() if each not in before]
    end(pool)
    thread.join(LONG_S)
    assert not thread.is_alive()


MEBIBYTE = 2**20
MEMORY = Path(shm_backend_utils.__file__).parent / "memory"
INTERRUPTS = Interrupts(MEMORY / "pool", MEMORY / "managed.py")


def heal(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the housekeeper find what is lost, without waiting for some seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(inventory_module, "_LOST_S", -1.0)
        pool._keep_house()


def test_an_interrupt_while_regions_make_way_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    destroy = SlotRegion.destroy
    begun: list[SlotRegion] = []

    def interrupted_at_the_second(region: SlotRegion) -> None:
        begun.append(region)
        if len(begun) == 2:
            raise KeyboardInterrupt
        destroy(region)

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        taken = [pool.take_granted(pool.request(Need(1), "another")) for _ in range(3)]
        regions = [region for region, _ in taken]
        for region in regions:
            region.is_registered = True
        del taken
        need = Need(3 * REGION - data_offset(1, PAGE_SIZE))
        monkeypatch.setattr(SlotRegion, "destroy", interrupted_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            pool.request(need, "taker")
        pool.drop_idle()
        heal(pool, monkeypatch)
        assert pool.status.byte_size == 0
        assert not any(map(is_there, regions))
        assert sorted(pool.take_unregistered()) == sorted(region.key for region in regions)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_step_leaves_nothing_behind_and_closes() -> None:
    before, step = own_files(), 1
    while True:
        pool = SlotPool(PoolOptions(max_bytes=MEBIBYTE))
        was_interrupted = INTERRUPTS.at(step, lambda: pool.take_granted(pool.request(Need(1), "taker")))  # noqa: B023
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        closing.join(LONG_S)
        assert not closing.is_alive(), f"closing hangs after an interrupt at {INTERRUPTS.where}"
        assert own_files() == before, f"memory is left after an interrupt at {INTERRUPTS.where}"
        if not was_interrupted:
            return
        step += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_step_of_taking_what_was_granted_leaves_no_reservation() -> None:
    was_interrupted, step = True, 1
    while was_interrupted:
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
            take(pool, PAGE_SIZE + 1, group="other")  # makes way, for more than asked
            waiter = pool.request(Need(1), "taker")
            was_interrupted = INTERRUPTS.at(step, lambda: pool.take_granted(waiter))  # noqa: B023
            pool.withdraw(waiter)
            pool.drop_idle()
            status = pool.status
            assert status.byte_size == status.held * REGION, f"a reservation is left after {INTERRUPTS.where}"
        step += 1


def test_an_interrupt_at_any_step_of_taking_an_idle_region_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    was_interrupted, step = True, 1
    while was_interrupted:
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
            pool.take_granted(pool.request(Need(1), "another"))
            taken: list[Any] = []  # so that no finalizer is interrupted
            was_interrupted = INTERRUPTS.at(step, lambda: taken.append(pool.take_idle(Need(1), "taker")))  # noqa: B023
            taken.clear()
            heal(pool, monkeypatch)
            assert pool.status.held == 0, f"the region is lost after an interrupt at {INTERRUPTS.where}"
            pool.take_granted(pool.request(Need(1), "next"))
        step += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_step_of_a_finalizer_loses_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 1
    while step == 1 or INTERRUPTS.where:
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
            held = [pool.take_granted(pool.request(Need(1), "another"))]
            INTERRUPTS.at(step, held.clear)
            heal(pool, monkeypatch)
            region, memory = take(pool)
            assert pool.take_idle(Need(1), "third") is None, f"it is in use twice after {INTERRUPTS.where}"
            assert (region.byte_size, memory.nbytes, pool.status.held) == (REGION, REGION, 1)
        step += 1


@pytest.mark.parametrize("end", [SlotPool.close, SlotPool.abandon])
def test_a_pool_that_ends_early_has_no_thread(end: Callable[[SlotPool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Late(Repeater):
        def __init__(self, *given: Any) -> None:
            ending._closed = True  # as whoever ends it does first
            super().__init__(*given)
            threads.append(self._thread)

    ending = SlotPool(PoolOptions(max_bytes=MEBIBYTE))
    monkeypatch.setattr(pool_module, "Repeater", Late)
    with pytest.raises(ClosedError):
        ending.take_granted(ending.request(Need(1), "taker"))
    end(ending)
    threads[0].join(LONG_S)
    assert not threads[0].is_alive()
    assert own_files() == set()


LARGER = 2 * region_size(Need(1))


def spoil(pool: SlotPool) -> None:
    region, memory = take(pool, group="triton-shm")
    region.spoil("lost")
    del memory
    eventually(lambda: pool.status.byte_size == 0)


WAYS_TO_GO: dict[str, Callable[[SlotPool], object]] = {
    "it is idle for too long": SlotPool.drop_idle,
    "it makes way for another": lambda pool: take(pool, LARGER),
    "it made way for a waiter that gave up": lambda pool: pool.withdraw(pool.request(Need(LARGER), "taker")),
    "it is spoiled": spoil,
    "the pool is closed": SlotPool.close,
    "the pool is abandoned": SlotPool.abandon,
}


def test_keys_that_another_thread_takes_meanwhile_are_no_error(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(deque[str]):
        def popleft(self) -> str:
            self.clear()
            return super().popleft()

    monkeypatch.setattr(pool._inventory, "_unregistered", Shared(["key"]))
    assert pool.take_unregistered() == []


@pytest.mark.parametrize("go", WAYS_TO_GO.values(), ids=list(WAYS_TO_GO))
def test_nobody_is_told_to_unregister_a_region_that_has_its_name(
    monkeypatch: pytest.MonkeyPatch, go: Callable[[SlotPool], object]
) -> None:
    registering = SlotPool(PoolOptions(max_bytes=region_size(Need(LARGER))))  # one region makes way for the other
    region = used(registering, group="triton-shm")
    region.is_registered = True
    told_too_early: list[str] = []
    destroy = SlotRegion.destroy

    def destroy_late(destroyed: SlotRegion) -> None:
        told_too_early.extend(registering.take_unregistered())  # as another thread may ask just then
        destroy(destroyed)

    monkeypatch.setattr(SlotRegion, "destroy", destroy_late)
    assert is_there(region)
    go(registering)
    assert (told_too_early, is_there(region)) == ([], False)
    assert registering.take_unregistered() == [region.key]
    registering.close()
