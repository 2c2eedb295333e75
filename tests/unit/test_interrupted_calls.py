"""Interrupts between any two bytecodes of a call, and system calls that fail: nothing is wrong afterwards, or lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.client import AsyncShmClient, DeadlineExceededError, PoolOptions, ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.pool import inventory
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.parameters import parse_address
from shm_backend_utils.testing.faults.at_hand import Late
from shm_backend_utils.testing.faults.system_calls import INTERRUPT, Failing, Fault, Interrupts
from shm_backend_utils.testing.harness import ModelHarness
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.checked_calls import IMAGE, LONG_S, Call, X, infer, prepare, stream, submit
from tests.e2e.eventually import eventually
from tests.opened import open_region

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(shm_backend_utils.__file__).parent
INTERRUPTS = Interrupts(*map(PACKAGE.joinpath, ("client", "memory", "protocol", "tensors")), *PACKAGE.glob("*.py"))


@pytest.fixture(scope="module")
def harness() -> Iterator[ModelHarness]:
    folder = ROOT / "model_repository"
    with ModelHarness.in_child(folder / "identity", folder / "frames") as harness:
        yield harness


@pytest.fixture
def _healing_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost counts as such sooner. What is raised in a finalizer is swallowed by Python: nobody keeps it."""
    monkeypatch.setattr(inventory, "_LOST_S", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def client_of(harness: ModelHarness) -> ShmClient:
    return ShmClient(harness, timeout_s=LONG_S, pool=PoolOptions(max_bytes=2**26), inline_bytes=0)


def steps(every: int, call: object = None) -> Iterator[int]:
    if call is submit and sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12 crashes in a thread beside the one whose bytecodes are traced")
    step = 1
    while step == 1 or INTERRUPTS.where:
        yield step
        step += every


def is_empty(client: ShmClient) -> bool:
    pool = cast(Any, client)._memory.pool
    pool._keep_house()
    pool.drop_idle()
    return (pool.status.held, pool.status.idle, pool.status.quarantined, pool.status.byte_size) == (0, 0, 0, 0)


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "new memory"])
@pytest.mark.parametrize(
    ("call", "every"),
    [
        *((call, 97) for call in (infer, submit, prepare)),
        (stream, 499),
        *(pytest.param(call, 1, marks=pytest.mark.long) for call in (infer, submit, prepare)),
        pytest.param(stream, 7, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(600)
def test_an_interrupt_of_a_call_loses_nothing(harness: ModelHarness, call: Call, every: int, is_warm: bool) -> None:
    with client_of(harness) as client:
        assert call(client)
        assert is_empty(client)
        probe = ShmLeakProbe(None)
        for step in steps(every, call):
            assert call(client), INTERRUPTS.where
            if not is_warm:
                eventually(lambda: is_empty(client))
            INTERRUPTS.at(step, lambda: call(client))
            gc.collect()
            eventually(lambda: is_empty(client), lambda: INTERRUPTS.where)
            eventually(lambda: not probe.growth(), lambda: (INTERRUPTS.where, probe.growth()))


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("is_asked_again", [True, False])
@pytest.mark.parametrize("kind", RegionKind)
def test_an_interrupt_leaves_a_region_that_a_model_can_open(kind: RegionKind, is_asked_again: bool) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**20))) as pool:
        for step in steps(3):
            region, memory = pool.take_granted(pool.request(Need(2**12, kind=kind), INTERRUPTS.where))
            address = parse_address(region.slots[0].address_pattern % "m")
            with contextlib.closing(open_region(address.key, address.token, INTERRUPTS.where)) as opened:
                assert opened.header.byte_size == region.byte_size == region.data_end
            end = region.data_end + 2**12
            INTERRUPTS.at(step, functools.partial(pool.grow, region, end))
            if is_asked_again:
                assert pool.grow(region, end)
                assert np.frombuffer(region.buffer, np.uint8).nbytes == region.data_end == end
            del region, memory
            gc.collect()
            if is_asked_again:
                pool.drop_idle()
        pool.drop_idle()
        eventually(lambda: pool.status.byte_size == 0)


@pytest.mark.usefixtures("_healing_soon")
@pytest.mark.parametrize("every", [pytest.param(997, id="some"), pytest.param(13, id="many", marks=pytest.mark.long)])
@pytest.mark.parametrize("call", [infer, submit, prepare, stream])
@pytest.mark.timeout(600)
def test_an_interrupt_of_the_only_call_leaves_nothing(harness: ModelHarness, call: Call, every: int) -> None:
    with client_of(harness) as another:
        assert call(another)

        def only_call() -> None:
            with client_of(harness) as client:
                assert call(client)

        probe, threads = ShmLeakProbe(None), threading.active_count()
        for step in steps(every, call):
            INTERRUPTS.at(step, only_call)
            gc.collect()
            eventually(lambda: not probe.growth(), lambda: (INTERRUPTS.where, probe.growth()))
            eventually(lambda: threading.active_count() <= threads, lambda: INTERRUPTS.where)
            assert call(another), INTERRUPTS.where


@pytest.mark.parametrize("call", ["open", "fstat", "mmap"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EACCES, INTERRUPT])
def test_nothing_stays_open_whichever_call_fails(region: ManagedRegion, call: str, error: int) -> None:
    happened, after = True, 0
    while happened:
        with ShmLeakProbe(pool_prefix=None), Failing(Fault(call, after, error)) as failing:
            try:
                open_region(region.segment.key, region.header.token.hex(), "region").close()
            except (OSError, ShmError, KeyboardInterrupt):
                assert failing.has_happened
        happened, after = failing.has_happened, after + 1
    assert after > 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotPool]:
    monkeypatch.setattr(pool_module, "_QUARANTINE_ROUND_S", 60)  # its rounds are the tests' own
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=1 << 20))) as pool:
        yield pool
        pool.drop_idle()
        assert pool.status.byte_size == 0


def take_in_doubt(pool: SlotPool) -> list[object]:
    region, memory = pool.take_granted(pool.request(Need(100), "test"))
    region.slots[0].state = "sent"
    return [memory]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOMEM, errno.EINTR])
@pytest.mark.parametrize("after", [0, 1])
def test_a_region_in_doubt_is_looked_at_again_if_there_was_no_lock(pool: SlotPool, error: int, after: int) -> None:
    memory = take_in_doubt(pool)
    with Failing(Fault("fcntl", after, error)) as failing:
        memory.clear()
        eventually(lambda: failing.has_happened)
    assert (pool.status.quarantined, pool.status.idle) == (0, 1)


def test_of_several_in_quarantine_none_is_lost_when_looking_at_the_first_is_interrupted(pool: SlotPool) -> None:
    memories = [take_in_doubt(pool) for _ in range(3)]
    cast(Any, pool)._housekeeper.stop()  # a late round of its would be interrupted in place of this thread
    leases = [region._region.lease(0) for region, _ in pool.held()]
    assert all(lease.take() for lease in leases)  # a model is at work there
    for memory in memories:
        memory.clear()
    assert pool.status.quarantined == 3
    for lease in leases:
        lease.give_back()
    with Failing(Fault("fcntl", 0, INTERRUPT)), pytest.raises(KeyboardInterrupt):
        _ = pool.status
    assert (pool.status.quarantined, pool.status.idle) == (0, 3)


def test_an_interrupt_while_a_lock_is_asked_for_leaves_it_free(pool: SlotPool) -> None:
    region, memory = pool.take_granted(pool.request(Need(100), "test"))
    lease, fd = region._region.lease(0), region._region.segment.fileno()
    for take in (lease.take, lease.take_back, lambda: locks.borrow(fd, region._region.record_offset(0))):
        for error, raised in ((INTERRUPT, KeyboardInterrupt), (errno.ENOLCK, (OSError, ShmError))):
            with Failing(Fault("fcntl", 0, error)), pytest.raises(raised):
                take()
            assert not lease.is_taken_here
            assert lease.take_back()
            lease.give_back()
    del memory


def test_a_region_whose_making_fails_at_any_call_leaves_the_budget_as_it_was(pool: SlotPool) -> None:
    for call in ("open", "posix_fallocate", "fchmod", "fstat", "link", "fcntl", "mmap"):
        for error in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, INTERRUPT):
            happened, after = True, 0
            while happened:
                with Failing(Fault(call, after, error)) as failing:
                    try:
                        _, memory = pool.take_granted(pool.request(Need(100), "test"))
                        del memory
                    except (OSError, ShmError, KeyboardInterrupt):
                        assert failing.has_happened
                happened, after = failing.has_happened, after + 1
                pool.drop_idle()
                assert pool.status.byte_size == 0
            assert after > 1, f"{call} was not called"


def test_a_region_for_which_no_thread_can_be_started_is_gone(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "Repeater", repeat)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.take_granted(pool.request(Need(100), "test"))
    assert (pool.status.held, pool.status.idle, pool.status.byte_size) == (0, 0, 0)
    take_in_doubt(pool).clear()
    assert pool.status.idle == 1


def test_a_late_answer_comes_to_tasks_and_streams_or_the_deadline_is_over(harness: ModelHarness) -> None:
    async def call() -> None:
        late = Late(harness, 0.0)
        async with AsyncShmClient(late, timeout_s=LONG_S) as client:
            assert (await client.infer("identity", {"INPUT0": X}))["OUTPUT0"].tolist() == X.tolist()
            late.seconds = 3600.0
            with pytest.raises(DeadlineExceededError):
                await client.infer("identity", {"INPUT0": X}, timeout_s=0.1)

    asyncio.run(call())
    late = Late(harness, 0.0)
    with ShmClient(late, timeout_s=LONG_S) as client:
        assert stream(client)
        late.seconds = 3600.0
        with pytest.raises(DeadlineExceededError):
            list(client.stream("frames", {"IMAGE": IMAGE}, timeout_s=0.1))
