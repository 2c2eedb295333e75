"""What may be slow to close is closed in threads that nobody waits for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import shm_backend_utils
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover.peers import MOST_THREADS, MOST_WAITING, Closer
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import LONG_S, count_open, settles

FILE = Path(shm_backend_utils.__file__).parent / "memory" / "handover" / "peers.py"


class Slow:
    """What is closed when a test lets it; at once in a forked child, as it is open in the parent."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def close(self) -> None:
        self.begun.set()
        if os.getpid() == self.process_id:
            self.may_end.wait(LONG_S)


class Failing:
    def close(self) -> None:
        raise OSError("it cannot be closed")


def an_open_one() -> Descriptor:
    return Descriptor(os.open, "/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def closers() -> int:
    return [thread.name for thread in threading.enumerate()].count("shm-closer")


def close(closer: Closer, what: Any) -> None:
    closer.close(what)


def hang(closer: Closer, count: int) -> list[Slow]:
    slow = [Slow() for _ in range(count)]
    for each in slow:
        close(closer, each)
    assert all(each.begun.wait(LONG_S) for each in slow)
    return slow


def test_slow_ones_keep_nobody_waiting_as_long_as_they_are_few() -> None:
    closer = Closer()
    slow = hang(closer, MOST_THREADS - 1)
    for what in [an_open_one() for _ in range(MOST_WAITING)]:
        closer.close(what)
        assert settles(lambda: what.fileno() == -1)  # noqa: B023
    assert settles(lambda: closer.waiting == len(slow))
    assert not closer.is_full
    for each in slow:
        each.may_end.set()
    assert settles(lambda: closer.waiting == 0)


def test_it_is_full_when_many_wait() -> None:
    closer = Closer()
    slow = hang(closer, MOST_THREADS)
    for _ in range(MOST_WAITING - MOST_THREADS - 1):
        close(closer, Failing())
    before = closer.is_full
    close(closer, Failing())
    assert (before, closer.is_full) == (False, True)
    for each in slow:
        each.may_end.set()
    assert settles(lambda: closer.waiting == 0)


def test_one_that_cannot_be_closed_is_in_nobodys_way() -> None:
    closer, what = Closer(), an_open_one()
    close(closer, Failing())
    closer.close(what)
    assert settles(lambda: what.fileno() == -1)


def test_the_thread_ends_when_there_is_nothing_to_do_and_the_next_one_has_a_thread_again() -> None:
    closer = Closer()
    for _ in range(2):
        what = an_open_one()
        closer.close(what)
        assert settles(lambda: what.fileno() == -1)  # noqa: B023
        assert settles(lambda: closers() == 0)


def test_without_a_thread_all_waits_until_one_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    closer, what = Closer(), an_open_one()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        closer.close(what)
    assert (closer.waiting, what.fileno() >= 0) == (1, True)
    closer.close(an_open_one())
    assert settles(lambda: closer.waiting == 0)
    assert what.fileno() == -1


def test_a_burst_needs_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    closer, begun, start = Closer(), [], threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    for _ in range(100):
        closer.close(an_open_one())
    assert settles(lambda: closer.waiting == 0)
    assert len(begun) <= MOST_THREADS


def test_what_an_interrupt_leaves_open_is_closed_with_the_next_one() -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        closer = Closer()
        was_interrupted = Interrupts(FILE).at(line, lambda: closer.close(an_open_one()))  # noqa: B023
        closer.close(an_open_one())
        assert settles(lambda: count_open() == before), f"it is left open after an interrupt at line {line}"
        line += 1
    assert line > 3


def test_a_forked_child_has_nothing_of_it_and_can_close() -> None:
    run_program(
        "os._exit",
        """
        import threading
        from tests.unit.handover.asking import count_open, settles
        from tests.unit.handover.test_closer import MOST_THREADS, Closer, an_open_one, hang

        before, closer = count_open(), Closer()
        slow = hang(closer, MOST_THREADS)
        left = an_open_one()
        closer.close(left)

        def work():
            assert (closer.waiting, count_open()) == (0, before)
            own = an_open_one()
            closer.close(own)
            assert settles(lambda: own.fileno() == -1)

        in_child(work)
        assert left.fileno() >= 0, "the child has closed its parent's"
        for each in slow:
            each.may_end.set()
        assert settles(lambda: left.fileno() == -1)
        """,
    )
