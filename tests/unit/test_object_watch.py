"""What runs or listens beside the calls: a thread that does something from time to time, and what the kernel tells.

It tells of objects in /dev/shm. Other tests may open some meanwhile, so silence is waited for.
"""

from __future__ import annotations

import mmap
import os
import queue
import resource
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.memory import object_watch
from shm_backend_utils.memory.object_watch import ObjectWatch
from shm_backend_utils.memory.repeater import Repeater

LONG_S = 30.0
NEVER_S = 1e6


def test_the_work_is_done_again_and_again() -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def work() -> float:
        threads.put(threading.current_thread())
        return 0.0

    repeater = Repeater(work, 0, "test")
    (thread,) = {threads.get(timeout=LONG_S) for _ in range(3)}
    repeater.stop()
    assert (thread.name, thread.daemon) == ("test", True), "it keeps no program alive"


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


def test_the_thread_has_ended_when_it_was_stopped_and_nothing_is_done_any_more() -> None:
    done: list[int] = []

    def work() -> float:
        done.append(1)
        return NEVER_S

    before = set(threading.enumerate())
    repeater = Repeater(work, NEVER_S, "test")
    (thread,) = set(threading.enumerate()) - before
    repeater.stop()
    assert not thread.is_alive()
    repeater.hurry()
    repeater.stop()
    assert done == []


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


def test_one_that_an_interrupt_has_taken_from_everybody_ends() -> None:
    Repeater(lambda: NEVER_S, NEVER_S, "lost by an interrupt")
    for thread in [each for each in threading.enumerate() if each.name == "lost by an interrupt"]:
        thread.join(LONG_S)
        assert not thread.is_alive()


SHM: Final = Path("/dev/shm")
LOOKS: Final = 100_000


@pytest.fixture
def path() -> Iterator[Path]:
    path = SHM / f"watched-{os.getpid()}-{secrets.token_hex(8)}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def watch() -> Iterator[ObjectWatch]:
    with closing(ObjectWatch()) as watch:
        yield watch


def wait_for_silence(watch: ObjectWatch) -> None:
    assert not all(watch.has_news() for _ in range(LOOKS))


def test_an_object_that_is_opened_is_news_once(watch: ObjectWatch, path: Path) -> None:
    wait_for_silence(watch)
    fd = os.open(path, os.O_RDWR)
    assert watch.has_news()
    wait_for_silence(watch)
    os.close(fd)


@pytest.mark.parametrize("has_name", [True, False])
def test_a_mapping_that_goes_is_news_though_its_descriptor_went_long_before(
    watch: ObjectWatch, path: Path, has_name: bool
) -> None:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    if not has_name:
        path.unlink()
    wait_for_silence(watch)
    mapped.close()
    assert watch.has_news()


def test_more_news_than_the_kernel_keeps_are_news(watch: ObjectWatch, path: Path) -> None:
    for _ in range(20_000):
        os.close(os.open(path, os.O_RDWR))
    assert watch.has_news()
    wait_for_silence(watch)
    os.close(os.open(path, os.O_RDWR))
    assert watch.has_news()


def test_a_closed_watch_cannot_say_that_nothing_happened(watch: ObjectWatch) -> None:
    watch.close()
    watch.close()
    assert watch.has_news()


def test_a_forked_child_does_not_take_its_parents_news(watch: ObjectWatch, path: Path) -> None:
    wait_for_silence(watch)
    os.close(os.open(path, os.O_RDWR))
    child = os.fork()
    if not child:
        os._exit(0 if watch.has_news() and watch.has_news() else 1)  # it was closed there, and knows nothing
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watch.has_news()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def test_a_watch_that_is_lost_leaves_no_descriptor() -> None:
    before = open_descriptors()
    ObjectWatch()
    assert open_descriptors() == before


def test_a_directory_that_cannot_be_watched_is_an_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_watch, "DEV_SHM", Path("/nowhere"))
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        ObjectWatch()
    assert open_descriptors() == before


def test_an_instance_that_cannot_be_had_is_an_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ObjectWatch()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
