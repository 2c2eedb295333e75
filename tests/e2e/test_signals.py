"""Signals whose handler raises at random moments of calls: nothing is wrong afterwards, and nothing is lost.

``--interrupts`` says how many.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.checked_calls import Call, infer, prepare, stream, submit

from .eventually import eventually
from .flavours import url_of

AGAIN_S = 1e-4


class Signals:
    """SIGUSR1 for the main thread, whose handler raises KeyboardInterrupt, once, within :meth:`raise_in`.

    It does not raise where Python itself loses something: in the module threading, as an interrupt within
    ``Condition.__enter__`` leaves the lock taken for ever, gRPC's too; and in the finalizer that closes a descriptor.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self.count = 0

    def raise_in(self, work: Call, client: ShmClient, delay_s: float) -> bool | None:
        """Return what some work returns; None if it was interrupted."""
        is_over = threading.Event()
        sender = threading.Thread(target=self._send, args=(threading.get_ident(), delay_s, is_over))
        sender.start()
        try:
            try:
                self._is_armed = True
                return work(client)
            finally:
                self._is_armed = False
        except KeyboardInterrupt:
            return None
        finally:
            is_over.set()
            sender.join()

    def _send(self, thread: int, delay_s: float, is_over: threading.Event) -> None:
        while not is_over.wait(delay_s) and self._is_armed:
            signal.pthread_kill(thread, signal.SIGUSR1)
            delay_s = AGAIN_S

    def handle(self, _: int, frame: FrameType | None) -> None:
        assert frame is not None
        is_lossy = frame.f_code.co_filename == threading.__file__ or frame.f_code is Descriptor.__del__.__code__
        if self._is_armed and not is_lossy:
            self._is_armed = False
            self.count += 1
            raise KeyboardInterrupt


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python swallows what is raised in a finalizer
    signals = Signals()
    before = signal.signal(signal.SIGUSR1, signals.handle)
    yield signals
    signal.signal(signal.SIGUSR1, before)


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
    chance, came = random.Random(most), Counter[str]()
    calls = [infer, prepare, submit, *([stream] if protocol == "grpc" else [])]
    usual_s = dict.fromkeys(calls, 0.01)
    pool = PoolOptions(max_bytes=2**23)
    with ShmClient(url_of(triton_server, protocol), pool=pool, inline_bytes=0) as client:
        assert all(call(client) for call in calls)
        eventually(lambda: is_empty(client))
        probe = ShmLeakProbe(None)
        while signals.count < most:
            call = chance.choice(calls)
            begin = time.perf_counter()
            try:
                is_right = signals.raise_in(call, client, chance.uniform(1e-5, usual_s[call]))
                came["interrupted" if is_right is None else "right" if is_right else "wrong"] += 1
                if is_right:
                    usual_s[call] += (time.perf_counter() - begin - usual_s[call]) / 20
            except Exception as error:
                came[f"{call.__name__}: {error!r}"[:200]] += 1
        gc.collect()
        eventually(lambda: is_empty(client))
        eventually(lambda: not probe.growth())
        print(f"{signals.count} interrupts: {came}")
    assert set(came) <= {"interrupted", "right"}
