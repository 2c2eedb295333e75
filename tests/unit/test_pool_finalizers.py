"""Finalizers: they run in any thread and at any point, also while a pool is in the middle of something.

A pool puts an origin into words while nobody else may touch it. So an origin whose words take down objects is the
surest way to have finalizers run at the worst time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

SHM = Path("/dev/shm")
REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
LONG_S = 30.0


class Disruptive:
    """A holder that does something else while it is put into words."""

    def __init__(self, disrupt: Callable[[], object]) -> None:
        self._disrupt = disrupt

    def __str__(self) -> str:
        self._disrupt()
        return "disrupt"


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have one region."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        yield pool


def take(pool: SlotPool, origin: object) -> npt.NDArray[np.uint8]:
    return pool.redeem(pool.request(Need(1), origin))[1]


def test_memory_that_dies_while_the_pool_is_locked_comes_back(pool: SlotPool) -> None:
    held: list[Any] = []
    held.append(take(pool, Disruptive(held.clear)))
    ticket = pool.request(Need(1), Origin.here("wait"))
    ticket.granted.result(LONG_S)
    assert held == []


def test_memory_that_is_collected_while_the_pool_is_locked_comes_back(pool: SlotPool) -> None:
    cycle: list[Any] = [take(pool, Disruptive(gc.collect))]
    cycle.append(cycle)
    del cycle
    ticket = pool.request(Need(1), Origin.here("wait"))
    ticket.granted.result(LONG_S)


def test_memory_that_dies_in_another_thread_while_the_pool_is_locked_comes_back(pool: SlotPool) -> None:
    held: list[Any] = []

    def let_another_thread_clear() -> None:
        other = threading.Thread(target=held.clear)
        other.start()
        other.join()

    held.append(take(pool, Disruptive(let_another_thread_clear)))
    ticket = pool.request(Need(1), Origin.here("wait"))
    ticket.granted.result(LONG_S)
    assert held == []


def test_memory_that_dies_while_an_error_is_put_into_words_comes_back(pool: SlotPool) -> None:
    doomed: list[Any] = []
    held = [take(pool, Disruptive(doomed.clear))]
    ticket = pool.request(Need(1), Origin.here("wait"))
    assert not ticket.granted.done()
    doomed.append(held.pop())
    pool.exhausted(ticket, 1)
    ticket.granted.result(LONG_S)


def test_a_pool_that_is_abandoned_removes_its_regions_and_fails_who_waits(pool: SlotPool) -> None:
    memory = take(pool, Origin.here("take"))
    ticket = pool.request(Need(1), Origin.here("wait"))
    pool.abandon()
    with pytest.raises(ClosedError):
        ticket.granted.result(LONG_S)
    assert objects_of_this_process() == []
    memory[-1] = 42
    assert memory[-1] == 42


def test_a_pool_that_was_abandoned_serves_nobody(pool: SlotPool) -> None:
    pool.abandon()
    pool.abandon()
    with pytest.raises(ClosedError):
        pool.request(Need(1), Origin.here("take"))


def test_a_pool_that_another_thread_abandons_while_it_is_locked_is_closed_then(pool: SlotPool) -> None:
    abandoned: list[threading.Thread] = []

    def abandon() -> None:
        other = threading.Thread(target=pool.abandon)
        other.start()
        abandoned.append(other)

    held = take(pool, Disruptive(abandon))
    ticket = pool.request(Need(1), Origin.here("wait"))
    abandoned[0].join()
    with pytest.raises(ClosedError):
        ticket.granted.result(LONG_S)
    assert objects_of_this_process() == []
    assert held.nbytes


def test_a_pool_that_is_abandoned_within_its_own_locked_section_is_closed_after_it(pool: SlotPool) -> None:
    held = take(pool, Disruptive(pool.abandon))
    with pytest.raises(ClosedError):
        pool.request(Need(1), Origin.here("wait")).granted.result(5)
    assert objects_of_this_process() == []
    assert held.nbytes


def objects_of_this_process() -> list[Path]:
    return list(SHM.glob(f"shmbu-{os.getpid()}-*"))


BEGIN = """
import contextlib, faulthandler, gc, logging
from shm_backend_utils.client import PoolOptions
from shm_backend_utils.origin import Origin
from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.errors import ClosedError

faulthandler.dump_traceback_later(10, exit=True)  # a deadlock

class Collecting:
    def __str__(self):
        gc.collect()
        return "take"

logging.basicConfig()
gc.disable()
memory_of_client = ClientMemory(PoolOptions(max_bytes=12288), CudaAccess())
pool = memory_of_client.pool
"""

PROGRAMS = {
    "a client that is collected while its pool is locked": """
        class Client:
            pass
        client = Client()
        client.itself = client
        memory_of_client.end_with(client)
        del client
        region, memory = pool.redeem(pool.request(Need(1), Collecting()))
        with contextlib.suppress(ClosedError):
            pool.request(Need(1), Origin.here("wait"))
    """,
    "a log handler that asks for the pool's figures": """
        figures = []
        handler = logging.Handler()
        handler.emit = lambda record: figures.append(pool.status)
        logging.getLogger("shm_backend_utils").addHandler(handler)
        region, memory = pool.redeem(pool.request(Need(1), Origin.here("take")))
        pool.request(Need(1), Origin.here("wait"))
        assert figures[0].held == 1
    """,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_it_does_not_hang(program: str) -> None:
    body = "\n".join(line[8:] for line in program.splitlines())
    with subprocess.Popen(
        [sys.executable, "-c", f"{BEGIN}{body}\npool.close()\n"], stderr=subprocess.PIPE, text=True
    ) as running:
        _, errors = running.communicate()
    for left in SHM.glob(f"shmbu-{running.pid}-*"):
        left.unlink(missing_ok=True)
    assert running.returncode == 0, errors


@pytest.mark.parametrize("end", [SlotPool.close, SlotPool.abandon], ids=["closed", "abandoned"])
def test_a_pool_that_has_ended_has_no_thread(end: Callable[[SlotPool], None]) -> None:
    before = threading.enumerate()
    pool = SlotPool(PoolOptions(max_bytes=REGION))
    take(pool, "taker")
    (thread,) = [each for each in threading.enumerate() if each not in before]
    end(pool)
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", [SlotPool.close, SlotPool.abandon], ids=["closed", "abandoned"])
def test_a_forked_childs_copy_of_a_pool_leaves_what_was_to_make_way_to_its_parent(
    end: Callable[[SlotPool], None],
) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        region, memory = pool.redeem(pool.request(Need(1, group="other"), "taker"))
        path = SHM / region.key
        del region, memory
        ticket = pool.request(Need(1), "taker")
        assert ticket.granted.done()
        pool.forsake()  # as in a child
        end(pool)
        assert path.exists()
        pool.is_forked = False  # its thread, and the file, are of this process in truth
    assert not path.exists()
