"""System calls that fail while regions are made, opened, or handed on: nothing is lost. And the faults themselves."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, DeadlineExceededError, ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.testing.faults.at_hand import Late
from shm_backend_utils.testing.faults.system_calls import INTERRUPT, Failing, Fault
from shm_backend_utils.testing.harness import ModelHarness
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.e2e.eventually import eventually


@pytest.mark.parametrize("call", ["open", "fstat", "mmap"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EACCES, INTERRUPT])
def test_nothing_stays_open_whichever_call_fails(region: ManagedRegion, call: str, error: int) -> None:
    happened, after = True, 0
    while happened:
        with ShmLeakProbe(pool_prefix=None), Failing(Fault(call, after, error)) as failing:
            try:
                ManagedRegion.open(region.segment.key, region.header.token.hex(), "region").close()
            except (OSError, ShmError, KeyboardInterrupt):
                assert failing.has_happened
        happened, after = failing.has_happened, after + 1
    assert after > 1


ERRORS = [errno.ENOLCK, errno.ENOMEM, errno.EINTR]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    monkeypatch.setattr(pool_module, "_QUARANTINE_ROUND_S", 60)  # its rounds are the tests' own
    return SlotPool(PoolOptions(max_bytes=1 << 20))


def take_in_doubt(pool: SlotPool) -> list[object]:
    region, memory = pool.take_granted(pool.request(Need(100), "test"))
    region.slots[0].state = "sent"
    return [memory]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [0, 1])
def test_a_region_in_doubt_is_looked_at_again_if_there_was_no_lock(pool: SlotPool, error: int, after: int) -> None:
    memory = take_in_doubt(pool)
    with Failing(Fault("fcntl", after, error)) as failing:
        memory.clear()
        eventually(lambda: failing.has_happened)
    assert (pool.status.quarantined, pool.status.idle) == (0, 1)
    pool.drop_idle()
    assert pool.status.byte_size == 0
    pool.close()


def test_of_several_in_quarantine_none_is_lost_when_looking_at_the_first_is_interrupted(pool: SlotPool) -> None:
    memories = [take_in_doubt(pool) for _ in range(3)]
    leases = [region._region.lease(0) for region, _ in pool.held()]
    for lease in leases:
        assert lease.take()  # a model is at work there
    for memory in memories:
        memory.clear()
    assert pool.status.quarantined == 3
    for lease in leases:
        lease.give_back()
    with Failing(Fault("fcntl", 0, INTERRUPT)), pytest.raises(KeyboardInterrupt):
        _ = pool.status
    assert (pool.status.quarantined, pool.status.idle) == (0, 3)
    pool.drop_idle()
    assert pool.status.byte_size == 0
    pool.close()


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
    pool.close()


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
    pool.close()


def test_a_region_for_which_no_thread_can_be_started_is_gone(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "Repeater", repeat)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.take_granted(pool.request(Need(100), "test"))
    status = pool.status
    assert (status.held, status.idle, status.byte_size) == (0, 0, 0)
    take_in_doubt(pool).clear()
    assert pool.status.idle == 1
    pool.close()


ROOT = Path(__file__).resolve().parents[3]
X = np.arange(4, dtype=np.float32)
AT_ONCE, NEVER = 0.0, 3600.0
SHORT_S, LONG_S = 0.1, 60.0


@pytest.fixture
def late() -> Iterator[Late]:
    with ModelHarness(ROOT / "model_repository" / "identity") as harness:
        yield Late(harness, AT_ONCE)


def test_a_task_gets_the_answer_or_the_deadline_is_over(late: Late) -> None:
    async def call() -> None:
        async with AsyncShmClient(late, timeout_s=LONG_S) as client:
            with await client.infer("identity", {"INPUT0": X}) as result:
                assert result["OUTPUT0"].tolist() == X.tolist()
            late.seconds = NEVER
            with pytest.raises(DeadlineExceededError):
                await client.infer("identity", {"INPUT0": X}, timeout_s=SHORT_S)

    asyncio.run(call())


def test_a_stream_goes_on_or_its_patience_is_over() -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    with ModelHarness(ROOT / "model_repository" / "frames") as harness:
        late = Late(harness, AT_ONCE)
        with ShmClient(late, timeout_s=LONG_S) as client:
            assert all(frame["TILE"].size for frame in client.stream("frames", {"IMAGE": image}))
            late.seconds = NEVER
            with pytest.raises(DeadlineExceededError):
                list(client.stream("frames", {"IMAGE": image}, timeout_s=SHORT_S))
