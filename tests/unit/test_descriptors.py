"""Descriptors of shared memory: owned by an object that no interrupt takes them from, and none left of a failure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.memory import descriptors as descriptors_module
from shm_backend_utils.memory import segment as segment_module
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.locks import SlotLease, has_users, use
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.testing.faults.system_calls import Interrupts


def descriptors() -> set[str]:
    """Return which descriptors are open, the one that this takes aside."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}  # noqa: PTH110, PTH208


def is_open(number: int) -> bool:
    return str(number) in descriptors()


def test_it_is_open_until_it_is_closed_or_its_object_is_gone() -> None:
    descriptor = Descriptor(os.open, "/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    number = descriptor.fileno()
    assert Path(f"/proc/self/fd/{number}").readlink() == Path("/dev/null")
    descriptor.close()
    assert not is_open(number)
    assert descriptor.fileno() == -1
    number = Descriptor(os.dup, 0).fileno()
    assert not is_open(number)


def test_closing_twice_closes_nobody_elses() -> None:
    descriptor = Descriptor(os.dup, 0)
    number = descriptor.fileno()
    descriptor.after_fork()
    again = os.dup(0)
    assert again == number
    descriptor.close()
    del descriptor
    assert is_open(again)
    os.close(again)


@pytest.mark.parametrize("is_closed", [False, True])
def test_it_is_open_without_its_object_where_it_is_to_be(is_closed: bool) -> None:
    descriptor = Descriptor(os.dup, 0)
    descriptor.outlive_object()
    number = descriptor.fileno()
    if is_closed:
        descriptor.close()
    del descriptor
    assert is_open(number) is not is_closed
    if not is_closed:
        os.close(number)


def test_an_interrupt_at_any_line_leaves_none_open() -> None:
    def work() -> None:
        kept.append(Descriptor(os.dup, 0))
        kept[-1].close()

    kept: list[Descriptor] = []  # as nobody would see what a finalizer raises
    before, was_interrupted, line = descriptors(), True, 1
    while was_interrupted:
        was_interrupted = Interrupts(Path(descriptors_module.__file__)).at(line, work)
        kept.clear()
        assert descriptors() == before, f"one is open after an interrupt at line {line}"
        line += 1
    assert line > 3


# What could not be opened, made, mapped or taken


PAGE = 4096
SHM = Path("/dev/shm")
FIELD = "regions[1]"


@pytest.fixture
def key() -> Iterator[str]:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    yield key
    (SHM / key).unlink(missing_ok=True)


@pytest.fixture
def file_key(key: str) -> str:
    (SHM / key).write_bytes(bytes(PAGE))
    return key


@pytest.fixture
def zero() -> Iterator[None]:
    """Have descriptor 0 free, as in a process that was started without a standard input."""
    kept = os.dup(0)
    os.close(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def failing(number: int) -> Callable[..., Any]:
    """Return a function that fails with an error of the system, or is interrupted if that is 0."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number)) if number else KeyboardInterrupt

    return fail


@pytest.mark.usefixtures("zero")
def test_a_descriptor_may_be_0_and_another_owners(file_key: str) -> None:
    lowest = Descriptor(os.open, SHM / file_key, os.O_RDWR)
    assert lowest.fileno() == 0
    lowest.close()
    assert not is_open(0)
    with SharedFile.open(file_key, FIELD) as file:
        descriptor = file.detach()
    assert is_open(descriptor.fileno())
    descriptor.close()


def test_a_file_that_cannot_be_mapped_is_closed_and_its_owners_fault(
    file_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", failing(errno.ENOMEM))
        with pytest.raises(RegionRefusedError, match=f"cannot map its {PAGE} bytes: Cannot allocate memory"):
            SystemSegment.open(file_key, PAGE, FIELD)
    os.truncate(SHM / file_key, 2**62)
    with no_more_descriptors(), pytest.raises(RegionRefusedError, match="Cannot allocate memory"):
        SystemSegment.open(file_key, PAGE, FIELD)


def test_a_segment_whose_preparation_fails_is_gone_while_its_error_lives(key: str) -> None:
    """An error keeps the frames that it came through, and with them what is collected later."""
    before = descriptors()

    def prepare(_: MappedSegment) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        SystemSegment.create(key, PAGE, prepare=prepare)
    assert not (SHM / key).exists()
    mapping = 1  # which lives as long as the frames do
    assert len(descriptors()) <= len(before) + mapping
    del caught
    assert descriptors() == before


def test_a_segment_whose_maker_is_interrupted_when_it_has_its_name_loses_it_while_the_interrupt_lives(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name = segment_module._give_name

    def give_and_interrupt(fd: int, key: str) -> None:
        give_name(fd, key)
        assert (SHM / key).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(segment_module, "_give_name", give_and_interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        SystemSegment.create(key, PAGE)
    assert not (SHM / key).exists()
    del caught


def test_a_segment_has_two_descriptors_of_which_none_is_left_when_it_is_closed(key: str) -> None:
    with no_more_descriptors():
        before = descriptors()
        segment = SystemSegment.create(key, PAGE)
        assert len(descriptors()) == len(before) + 2
        segment.close()
    with pytest.raises(ClosedError, match="this shared-memory segment"):
        segment.fileno()


def test_another_process_than_the_maker_takes_no_name_away(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SystemSegment.create(key, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        segment.unlink()
    assert (SHM / key).exists()
    segment.unlink()
    assert not (SHM / key).exists()
    segment = SystemSegment.create(key, PAGE)
    segment.after_fork()  # as in a forked child
    assert segment.is_closed
    assert (SHM / key).exists()


@pytest.mark.parametrize("is_mine", [False, True])
def test_a_segment_that_is_lost_is_closed_and_loses_its_name_only_if_it_is_ones_own(key: str, is_mine: bool) -> None:
    with no_more_descriptors():
        if is_mine:
            segment = SystemSegment.create(key, PAGE)
        else:
            (SHM / key).write_bytes(bytes(PAGE))
            segment = SystemSegment.open(key, PAGE, FIELD)
        assert not segment.is_unlinked
        del segment
    assert (SHM / key).exists() is not is_mine


# Leases


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


def test_a_shared_lease_that_is_lost_stays_held(fd: int) -> None:
    """What it protects may still be mapped. Its descriptor stays open until this process, or here the test, ends."""
    before = descriptors()
    use(fd)
    (lost,) = descriptors() - before
    assert has_users(fd)
    os.close(int(lost))
    assert not has_users(fd)


@pytest.mark.parametrize("take", [SlotLease.take, SlotLease.take_back], ids=["take", "take_back"])
@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, OSError), (0, KeyboardInterrupt)], ids=["error", "interrupt"]
)
def test_a_slots_lease_that_cannot_be_taken_is_free_afterwards(
    fd: int, monkeypatch: pytest.MonkeyPatch, take: Callable[[SlotLease], bool], number: int, error: type[BaseException]
) -> None:
    lease = SlotLease(fd, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", failing(number))
        with pytest.raises(error):
            take(lease)
    assert not lease.is_taken_here
    assert take(lease)
