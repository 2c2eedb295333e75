"""A thread that does something from time to time."""

from __future__ import annotations

import queue
import threading

from shm_backend_utils.memory.repeater import Repeater

LONG_S = 30.0
NEVER_S = 1e6


def test_the_work_is_done_again_and_again() -> None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> float:
        done.put(1)
        return 0.0

    repeater = Repeater(work, 0, "test")
    assert [done.get(timeout=LONG_S) for _ in range(3)] == [1, 1, 1]
    repeater.stop()


def test_it_is_done_in_a_thread_of_the_given_name_that_does_not_keep_the_program_alive() -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def work() -> float:
        threads.put(threading.current_thread())
        return NEVER_S

    repeater = Repeater(work, 0, "test")
    thread = threads.get(timeout=LONG_S)
    repeater.stop()
    assert (thread.name, thread.daemon) == ("test", True)


def test_it_is_done_at_once_if_somebody_hurries() -> None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> float:
        done.put(1)
        return NEVER_S

    repeater = Repeater(work, NEVER_S, "test")
    assert done.empty()
    for _ in range(2):
        repeater.hurry()
        done.get(timeout=LONG_S)
    repeater.stop()


def test_the_thread_has_ended_when_it_was_stopped() -> None:
    before = threading.active_count()
    repeater = Repeater(lambda: NEVER_S, NEVER_S, "test")
    assert threading.active_count() == before + 1
    repeater.stop()
    assert threading.active_count() == before


def test_nothing_is_done_any_more_when_it_was_stopped() -> None:
    done: list[int] = []

    def work() -> float:
        done.append(1)
        return NEVER_S

    repeater = Repeater(work, NEVER_S, "test")
    repeater.stop()
    repeater.hurry()
    assert done == []


def test_it_may_be_stopped_twice() -> None:
    repeater = Repeater(lambda: NEVER_S, NEVER_S, "test")
    repeater.stop()
    repeater.stop()


def test_the_work_may_stop_it() -> None:
    stopped = threading.Event()
    begin = threading.Event()

    def work() -> float:
        begin.wait(LONG_S)
        repeater.stop()
        stopped.set()
        return 0.0

    repeater = Repeater(work, 0, "test")
    begin.set()
    assert stopped.wait(LONG_S)
    repeater.stop()


def test_a_finalizer_may_stop_it_and_it_ends_at_once() -> None:
    repeater = Repeater(lambda: NEVER_S, NEVER_S, "stopped by a finalizer")
    repeater.stop_some_time()
    for thread in [each for each in threading.enumerate() if each.name == "stopped by a finalizer"]:
        thread.join(LONG_S)
        assert not thread.is_alive()
