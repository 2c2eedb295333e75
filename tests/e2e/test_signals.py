"""Signals whose handler raises at random moments of calls: nothing is wrong afterwards, and nothing is lost."""

from __future__ import annotations

import functools
import gc
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.tools.soak.client.signals import Signals
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.checked_calls import infer, prepare, stream, submit

from .eventually import eventually
from .flavours import url_of


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python swallows what is raised in a finalizer
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def is_empty(client: Any) -> bool:
    pool = client._memory.pool
    pool._keep_house()
    pool.drop_idle()
    return (pool.status.held, pool.status.idle, pool.status.quarantined, pool.status.byte_size) == (0, 0, 0, 0)


crashes = pytest.mark.needs_triton("2.53", "a server may crash when a call over gRPC is cancelled (its issue 7368)")


@pytest.mark.every_flavour
@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=crashes)])
def test_signals_that_raise_at_random_moments_of_calls_lose_nothing_and_no_answer_is_wrong(
    triton_server: EmbeddedServer, signals: Signals, protocol: str, request: pytest.FixtureRequest
) -> None:
    most = request.config.getoption("--interrupts")
    chance, came, answers = random.Random(most), Counter[str](), list[bool]()
    calls = [infer, prepare, submit, *([stream] if protocol == "grpc" else [])]
    usual_s = dict.fromkeys(calls, 0.01)
    pool = PoolOptions(max_bytes=2**23)
    with ShmClient(url_of(triton_server, protocol), pool=pool, inline_bytes=0) as client:
        assert all(call(client) for call in calls)
        eventually(lambda: is_empty(client))
        probe = ShmLeakProbe(None)
        while came["interrupted"] < most:
            call = chance.choice(calls)
            begin = time.perf_counter()
            try:
                work = functools.partial(lambda call: answers.append(call(client)), call)
                signals.raise_in(work, signal.SIGINT, chance.uniform(1e-5, usual_s[call]), lambda: None)
                is_right = answers.pop() if answers else None
                came["interrupted" if is_right is None else "right" if is_right else "wrong"] += 1
                if is_right:
                    usual_s[call] += (time.perf_counter() - begin - usual_s[call]) / 20
            except Exception as error:
                came[f"{call.__name__}: {error!r}"[:200]] += 1
        gc.collect()
        eventually(lambda: is_empty(client))
        eventually(lambda: not probe.growth())
        print(came)
    assert set(came) <= {"interrupted", "right"}
