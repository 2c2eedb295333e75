"""A signal's handler may raise at any point of a fetching: what was opened and received until then is closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.handover.fetching import Fetcher
from tests.unit.fetching.scripted_desk import FIELD, TOKEN, ScriptedDesk, give, memfd

STEPS = 300
STEP_S = 1e-5  # to 3 ms, which a fetching takes most often


class Interrupt(BaseException):
    """Of a signal's handler."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """Have SIGALRM raise."""

    def handle(*_: object) -> None:
        raise Interrupt

    old = signal.signal(signal.SIGALRM, handle)
    yield
    signal.signal(signal.SIGALRM, old)


def is_interrupted(fetcher: Fetcher, after_s: float) -> bool:
    """Fetch a region, and return whether the timer came before it was there."""
    with ScriptedDesk(give(memfd())) as desk:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            file = fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return True
        file.close()
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a finalizer
@pytest.mark.usefixtures("alarm")
def test_wherever_an_interrupt_comes_nothing_stays_open(fetcher: Fetcher) -> None:
    """The fixture of every test here counts descriptors."""
    interrupted = 0
    for step in range(STEPS):
        interrupted += is_interrupted(fetcher, (step + 1) * STEP_S)
    assert 0 < interrupted < STEPS
