"""What the kernel tells of objects in /dev/shm. Other tests may open some meanwhile, so silence is waited for."""

from __future__ import annotations

import mmap
import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.memory import object_watch
from shm_backend_utils.memory.object_watch import ObjectWatch

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


def test_a_mapping_that_goes_is_news_though_its_descriptor_went_long_before(watch: ObjectWatch, path: Path) -> None:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    wait_for_silence(watch)
    mapped.close()
    assert watch.has_news()


def test_a_mapping_of_an_object_that_has_lost_its_name_is_news_when_it_goes(watch: ObjectWatch, path: Path) -> None:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
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
