"""Descriptors of shared memory: owned by an object that no interrupt takes them from, and none left of a failure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shm_backend_utils.errors import ClosedError, MachineError, RegionRefusedError
from shm_backend_utils.memory import segment as segment_module
from shm_backend_utils.memory.access import Access
from shm_backend_utils.memory.descriptors import Descriptor, NoDescriptorsError
from shm_backend_utils.memory.locks import SharedLease, SlotLease, has_users, use
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile


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
    descriptor.forsake()
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


def test_what_cannot_be_opened_is_the_error_of_the_call() -> None:
    with pytest.raises(FileNotFoundError):
        Descriptor(os.open, "/nowhere", os.O_RDONLY)


class Interrupt(BaseException):
    """Of a signal's handler."""


def test_no_interrupt_leaves_one_open() -> None:
    mine = {test_no_interrupt_leaves_one_open.__code__, Descriptor.__init__.__code__, Descriptor.close.__code__}

    def handle(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code in mine:  # what a finalizer raises, nobody would see
            raise Interrupt

    before = len(descriptors())
    stopped = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not stopped.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(1e-5)

    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    thread = threading.Thread(target=interrupt)
    thread.start()
    interrupted = 0
    try:
        signal.signal(signal.SIGUSR1, handle)
        while interrupted < 500:
            try:
                descriptor = Descriptor(os.dup, 0)
                descriptor.close()
                del descriptor
            except Interrupt:
                interrupted += 1
    except Interrupt:
        interrupted += 1
    finally:
        while True:  # an interrupt may come in here, too
            try:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                break
            except Interrupt:
                continue
        stopped.set()
        thread.join()
        signal.signal(signal.SIGUSR1, old)
    assert interrupted
    assert len(descriptors()) == before


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
    """The name of a file of one page."""
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
    """Check that the block leaves as many open as there were."""
    before = descriptors()
    yield
    assert descriptors() == before


def failing(number: int) -> Callable[..., Any]:
    """Return a function that fails with an error of the system, or is interrupted if that is 0."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number)) if number else KeyboardInterrupt

    return fail


either_failure = pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, (OSError, MachineError)), (0, KeyboardInterrupt)], ids=["error", "interrupt"]
)


def test_a_file_that_is_not_to_be_mapped_is_closed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(SHM / key)
    with no_more_descriptors(), pytest.raises(RegionRefusedError, match="not a regular") as _kept:
        SharedFile.open(key, FIELD)
    (SHM / key).unlink()
    (SHM / key).write_bytes(bytes(PAGE))
    with no_more_descriptors(), SharedFile.open(key, FIELD) as file:
        file.check_size(PAGE)
    with no_more_descriptors(), monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing(errno.EIO))
        with pytest.raises(MachineError, match="Input/output error"):
            SharedFile.open(key, FIELD)
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(RegionRefusedError, match="the server cannot open it: Permission denied"):
        SharedFile.open(key, FIELD)


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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", [(os, "open"), (mmap, "mmap")], ids=["open", "map"])
def test_a_lack_of_descriptors_is_the_machines_fault_and_not_the_files(
    file_key: str, monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str], number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*what, failing(number))
        with pytest.raises(NoDescriptorsError, match="a shared-memory region takes two file descriptors"):
            SystemSegment.open(file_key, PAGE, FIELD)


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


@pytest.mark.parametrize("what", ["fchmod", "fchown", "posix_fallocate"])
@either_failure
def test_a_segment_that_cannot_be_made_keeps_nothing_open(
    key: str, monkeypatch: pytest.MonkeyPatch, what: str, number: int, error: type[BaseException]
) -> None:
    with no_more_descriptors(), monkeypatch.context() as patch:
        patch.setattr(os, what, failing(number))
        with pytest.raises(error):
            SystemSegment.create(key, PAGE, access=Access(group_id=os.getgid()))


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
    segment.forsake()  # as in a forked child
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


@either_failure
def test_a_shared_lease_that_cannot_be_taken_keeps_no_descriptor(
    fd: int, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    with no_more_descriptors(), monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", failing(number))
        with pytest.raises(error):
            SharedLease.take(fd, 1)


def test_a_shared_lease_that_is_lost_stays_held(fd: int) -> None:
    """What it protects may still be mapped. Its descriptor stays open until this process, or here the test, ends."""
    before = descriptors()
    use(fd)
    (lost,) = descriptors() - before
    assert has_users(fd)
    os.close(int(lost))
    assert not has_users(fd)


def test_a_shared_lease_whose_descriptor_is_0_is_given_back(fd: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("zero")  # behind the other, which would take it
    before = descriptors()
    lease = use(fd)
    assert "0" in descriptors()
    lease.give_back()
    assert descriptors() == before


@pytest.mark.parametrize("take", [SlotLease.take, SlotLease.take_back], ids=["take", "take_back"])
@either_failure
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
