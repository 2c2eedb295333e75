"""An interrupt while memory is taken: whatever is raised, wherever, the region comes back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

import shm_backend_utils
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset
from shm_backend_utils.testing.faults.interrupts import Interrupts

MEBIBYTE = 2**20
REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
SHM = Path("/dev/shm")
LONG_S = 10.0
MEMORY = Path(shm_backend_utils.__file__).parent / "memory"
INTERRUPTS = Interrupts(MEMORY / "pool", MEMORY / "managed.py")


def test_an_interrupt_while_pages_are_entered_loses_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        monkeypatch.setattr(SlotRegion, "prefault", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.redeem(pool.request(Need(1), "taker"))
        assert (pool.status.held, pool.status.idle) == (0, 1)


def test_an_interrupt_while_memory_is_made_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        monkeypatch.setattr(SlotRegion, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.redeem(pool.request(Need(1), "taker"))
        assert (pool.status.held, pool.status.byte_size) == (0, 0)


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "idle"])
def test_a_region_whose_taker_is_interrupted_before_it_has_the_memory_comes_back(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        if not is_new:
            pool.redeem(pool.request(Need(1), "another"))
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_hold", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.redeem(pool.request(Need(1), "taker"))
        assert (pool.status.held, pool.status.idle) == (0, 1)


def test_memory_that_dies_before_it_is_watched_gives_its_region_back_once() -> None:
    class Interrupted(dict[Any, Any]):
        def __setitem__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        pool._watched = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            pool.redeem(pool.request(Need(1), "taker"))
        assert (pool.status.held, pool.status.idle) == (0, 1)


def test_an_idle_region_whose_taker_is_interrupted_comes_back() -> None:
    class Interrupted(dict[Any, Any]):
        def __setitem__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        region, memory = pool.redeem(pool.request(Need(1), "another"))
        del memory
        watched = pool._watched
        pool._watched = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            pool.take_idle(Need(1), "taker")
        pool._watched = watched
        assert (pool.status.held, pool.status.idle) == (0, 1)
        taken = pool.take_idle(Need(1), "the next")
        assert taken is not None
        assert taken[0] is region


def test_an_interrupt_before_an_idle_region_is_taken_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(deque[SlotRegion]):
        def pop(self) -> SlotRegion:  # type: ignore[override]
            raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        pool.redeem(pool.request(Need(1), "another"))
        ((kind, shelves),) = pool._inventory.shelves.items()
        with monkeypatch.context() as patch:
            patch.setitem(pool._inventory.shelves, kind, [(size, Interrupted(each)) for size, each in shelves])
            with pytest.raises(KeyboardInterrupt):
                pool.take_idle(Need(1), "taker")
        assert (pool.status.held, pool.status.idle) == (0, 1)
        assert not pool._inventory.returned


def test_an_interrupt_before_memory_is_made_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        ticket = pool.request(Need(MEBIBYTE // 2), "taker")
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_settle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.redeem(ticket)
        pool.withdraw(ticket)
        assert (pool.status.held, pool.status.byte_size) == (0, 0)


def test_an_interrupt_while_regions_make_way_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    destroy = SlotRegion.destroy
    begun: list[SlotRegion] = []

    def interrupted(region: SlotRegion) -> None:
        begun.append(region)
        if len(begun) == 2:
            raise KeyboardInterrupt
        destroy(region)

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        taken = [pool.redeem(pool.request(Need(1), "another")) for _ in range(3)]
        regions = [region for region, _ in taken]
        for region in regions:
            region.is_registered = True
        del taken
        ticket = pool.request(Need(3 * REGION - data_offset(1, PAGE_SIZE)), "taker")
        monkeypatch.setattr(SlotRegion, "destroy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.redeem(ticket)
        assert pool.status.byte_size == 0
        assert not any((SHM / region.key).exists() for region in regions)
        assert sorted(pool.take_unregistered()) == sorted(region.key for region in regions)


def test_what_an_interrupted_close_has_left_goes_when_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        memories = []
        for _ in range(2):
            region, memory = pool.redeem(pool.request(Need(1), "taker"))
            memories.append(memory)
            del memory
        with monkeypatch.context() as patch:
            patch.setattr(SlotRegion, "destroy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.close()
        assert (SHM / region.key).exists()
        memories.pop()
        assert not (SHM / region.key).exists()


def test_other_threads_go_on_while_pages_are_entered() -> None:
    is_over = threading.Event()
    longest_s = 0.0

    def watch() -> None:
        nonlocal longest_s
        last = time.perf_counter()
        while not is_over.is_set():
            now = time.perf_counter()
            longest_s = max(longest_s, now - last)
            last = now

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=512 * MEBIBYTE, prefault=False))) as pool:
        region, memory = pool.redeem(pool.request(Need(256 * MEBIBYTE), "taker"))
        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.perf_counter()
        region.prefault()
        took_s = time.perf_counter() - begin
        is_over.set()
        watcher.join()
        assert memory.nbytes
        assert longest_s < took_s / 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_line_leaves_nothing_behind_and_closes() -> None:
    def files() -> set[Path]:
        return set(SHM.glob(f"shmbu-{os.getpid()}-*"))

    before = files()
    line = 1
    while True:
        pool = SlotPool(PoolOptions(max_bytes=MEBIBYTE))
        was_interrupted = INTERRUPTS.at(line, lambda: pool.redeem(pool.request(Need(1), "taker")))  # noqa: B023
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        closing.join(LONG_S)
        assert not closing.is_alive(), f"closing hangs after an interrupt at line {line}"
        assert files() == before, f"memory is left after an interrupt at line {line}"
        if not was_interrupted:
            return
        line += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_line_of_redeeming_leaves_no_promise() -> None:
    was_interrupted, line = True, 1
    while was_interrupted:
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
            pool.redeem(pool.request(Need(PAGE_SIZE + 1, group="other"), "another"))  # makes way, for more than asked
            ticket = pool.request(Need(1), "taker")
            was_interrupted = INTERRUPTS.at(line, lambda: pool.redeem(ticket))  # noqa: B023
            pool.withdraw(ticket)
            pool.drop_idle()
            status = pool.status
            assert status.byte_size == status.held * REGION, f"a promise is left after an interrupt at line {line}"
        line += 1


def test_an_interrupt_at_any_line_of_taking_an_idle_region_loses_none() -> None:
    was_interrupted, line = True, 1
    while was_interrupted:
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
            pool.redeem(pool.request(Need(1), "another"))
            taken: list[Any] = []  # so that no finalizer is interrupted
            was_interrupted = INTERRUPTS.at(line, lambda: taken.append(pool.take_idle(Need(1), "taker")))  # noqa: B023
            taken.clear()
            assert pool.take_idle(Need(1), "next"), f"the region is lost after an interrupt at line {line}"
        line += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer
def test_an_interrupt_at_any_line_of_a_finalizer_loses_no_region() -> None:
    lines = 40  # more than it has; Python swallows what is raised there
    for line in range(1, lines):
        with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
            held = [pool.redeem(pool.request(Need(1), "another"))]
            INTERRUPTS.at(line, held.clear)
            ticket = pool.request(Need(1), "next")
            assert ticket.granted.done(), f"the region is lost after an interrupt at line {line}"
            region, memory = pool.redeem(ticket)
            assert pool.take_idle(Need(1), "third") is None, f"it is in use twice after an interrupt at line {line}"
            assert (region.byte_size, memory.nbytes, pool.status.held) == (REGION, REGION, 1)
