"""An interrupt while memory is taken: whatever is raised, wherever, the region comes back."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import Need, SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion

MEBIBYTE = 2**20


def test_an_interrupt_while_pages_are_entered_loses_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(region: SlotRegion) -> None:
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
