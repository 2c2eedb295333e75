"""Answers that come late, for threads and for tasks; system calls that fail, and go well again afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, DeadlineExceededError, ShmClient
from shm_backend_utils.testing.faults.late import Late
from shm_backend_utils.testing.faults.system_calls import CALLS, Failing, Fault
from shm_backend_utils.testing.harness import ModelHarness

ROOT = Path(__file__).resolve().parents[3]
X = np.arange(4, dtype=np.float32)
AT_ONCE, NEVER = 0.0, 3600.0
SHORT_S, LONG_S = 0.1, 60.0


@pytest.fixture
def late() -> Iterator[Late]:
    with ModelHarness(ROOT / "model_repository" / "identity") as harness:
        yield Late(harness, AT_ONCE)


def test_a_thread_gets_the_answer_or_the_deadline_is_over(late: Late) -> None:
    with ShmClient(late, timeout_s=LONG_S) as client:
        assert client.infer("identity", {"INPUT0": X})["OUTPUT0"].tolist() == X.tolist()
        late.seconds = NEVER
        with pytest.raises(DeadlineExceededError):
            client.infer("identity", {"INPUT0": X}, timeout_s=SHORT_S)


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


@pytest.mark.parametrize("call", CALLS)
def test_faults_that_were_made_before_either_happens_leave_nothing_behind(call: str) -> None:
    module, name = CALLS[call]
    real = getattr(module, name)
    outer, inner = (Failing(Fault(call, 0, errno.EIO)) for _ in range(2))
    with outer:
        failing = getattr(module, name)
        with inner:
            assert getattr(module, name) is not failing
        assert getattr(module, name) is failing
    assert getattr(module, name) is real


def test_both_of_two_faults_happen() -> None:
    first, second = Failing(Fault("fstat", 0, errno.EIO)), Failing(Fault("fstat", 0, errno.EPERM))
    with first, second:
        for error in (errno.EPERM, errno.EIO, errno.EBADF):
            with pytest.raises(OSError, match=os.strerror(error)):
                os.fstat(-1)
    assert first.has_happened
    assert second.has_happened
