"""Descriptors of shared memory, which no interrupt takes away; and leases: who holds one, who sees it, when it goes."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory import descriptors as descriptors_module
from shm_backend_utils.memory import segment as segment_module
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.locks import (
    SharedLease,
    SlotLease,
    borrow,
    has_users,
    hold_owner_lease,
    is_owner_alive,
    is_slot_in_use,
    use,
    work,
)
from shm_backend_utils.memory.segment import MappedSegment, SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.opened import open_segment


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
    for is_closed in (False, True):
        descriptor = Descriptor(os.dup, 0)
        descriptor.outlive_object()
        number = descriptor.fileno()
        if is_closed:
            descriptor.close()
        del descriptor
        assert is_open(number) is not is_closed
        if not is_closed:
            os.close(number)


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


SHM = Path("/dev/shm")
FIELD = "regions[1]"


@pytest.fixture
def key() -> Iterator[str]:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    yield key
    (SHM / key).unlink(missing_ok=True)


@pytest.fixture
def file_key(key: str) -> str:
    (SHM / key).write_bytes(bytes(PAGE_SIZE))
    return key


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


@pytest.fixture
def other(fd: int) -> Iterator[int]:
    """Another description of the same file: what another process would have."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    yield other
    os.close(other)


third = other


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def test_a_descriptor_may_be_0_and_goes_with_its_file(file_key: str) -> None:
    kept = os.dup(0)
    os.close(0)  # as in a process that was started without a standard input
    lowest = Descriptor(os.open, SHM / file_key, os.O_RDWR)
    assert lowest.fileno() == 0
    lowest.close()
    assert not is_open(0)
    os.dup2(kept, 0)
    os.close(kept)
    with SharedFile.open(file_key, FIELD) as file:
        assert is_open(file.descriptor.fileno())
    assert file.descriptor.fileno() == -1


def test_a_file_that_cannot_be_mapped_is_closed_and_its_owners_fault(file_key: str) -> None:
    os.truncate(SHM / file_key, 2**62)
    told = f"cannot map its {2**62} bytes: Cannot allocate memory"
    with no_more_descriptors(), pytest.raises(RegionRefusedError, match=told):
        open_segment(file_key, PAGE_SIZE, FIELD)


def test_a_segment_whose_preparation_fails_is_gone_while_its_error_lives(key: str) -> None:
    """An error keeps the frames that it came through, and with them what is collected later."""
    before = descriptors()

    def prepare(_: MappedSegment) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        SystemSegment.create(key, PAGE_SIZE, prepare=prepare)
    assert not (SHM / key).exists()
    mapping = 1  # which lives as long as the frames do
    assert len(descriptors()) <= len(before) + mapping
    del caught
    assert descriptors() == before


def test_a_segment_loses_its_name_with_its_makers_interrupt(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_name = segment_module._give_name

    def give_and_interrupt(fd: int, key: str) -> None:
        give_name(fd, key)
        assert (SHM / key).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(segment_module, "_give_name", give_and_interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        SystemSegment.create(key, PAGE_SIZE)
    assert not (SHM / key).exists()
    del caught


def test_another_process_than_the_maker_takes_no_name_away(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SystemSegment.create(key, PAGE_SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        segment.unlink()
    segment.after_fork()  # as in a forked child
    assert segment.is_closed
    assert (SHM / key).exists()
    segment.unlink()
    assert not (SHM / key).exists()


@pytest.mark.parametrize("is_mine", [False, True])
def test_a_segment_that_is_lost_is_closed_and_loses_its_name_only_if_it_is_ones_own(key: str, is_mine: bool) -> None:
    with no_more_descriptors():
        if is_mine:
            segment = SystemSegment.create(key, PAGE_SIZE)
        else:
            (SHM / key).write_bytes(bytes(PAGE_SIZE))
            segment = open_segment(key, PAGE_SIZE, FIELD)
        assert not segment.is_unlinked
        del segment
    assert (SHM / key).exists() is not is_mine


def test_a_shared_lease_that_is_lost_stays_held(fd: int) -> None:
    """What it protects may still be mapped. Its descriptor stays open until this process, or here the test, ends."""
    before = descriptors()
    use(fd)
    (lost,) = descriptors() - before
    assert has_users(fd)
    os.close(int(lost))
    assert not has_users(fd)


RECORDS = [record_offset(slot, PAGE_SIZE) for slot in range(3)]
"""Where the records of a region's slots begin: the bytes of their leases."""
SLOT = RECORDS[1]


@pytest.fixture
def holder(fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process: it holds the owner's lease and slot 1's, and borrows slot 2, until it is killed."""
    program = (
        "import os, sys\nfrom shm_backend_utils.memory.locks import SlotLease, borrow, hold_owner_lease\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\nhold_owner_lease(fd)\n"
        f"lease = SlotLease(fd, {SLOT}).take() and borrow(fd, {RECORDS[2]})\nassert lease\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    words = [sys.executable, "-c", program, f"/proc/{os.getpid()}/fd/{fd}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def borrowed(fd: int) -> SharedLease:
    lease = borrow(fd, SLOT)
    assert lease is not None
    return lease


def test_leases_and_loans_of_another_process_go_with_it(fd: int, holder: subprocess.Popen[bytes]) -> None:
    lease, lent = SlotLease(fd, SLOT), SlotLease(fd, RECORDS[2])
    assert is_owner_alive(fd)
    with pytest.raises(AssertionError, match="another process holds the lease"):
        hold_owner_lease(fd)
    assert is_slot_in_use(fd, SLOT)
    assert not lease.take()
    assert not lent.take_back()
    holder.kill()
    holder.communicate()
    assert not is_owner_alive(fd)
    assert lease.take()
    assert lent.take_back()


def test_a_slot_with_a_gpu_at_work_is_in_use_and_may_be_taken_back(fd: int, other: int) -> None:
    client, at_work = SlotLease(fd, SLOT), work(other, SLOT)
    assert is_slot_in_use(fd, SLOT)
    assert client.take_back()
    at_work.give_back()
    assert not is_slot_in_use(fd, SLOT)


def test_a_client_takes_nothing_back_while_its_memory_is_borrowed(fd: int, other: int, third: int) -> None:
    client, lender = SlotLease(fd, SLOT), SlotLease(other, SLOT)
    first, second = borrowed(third), borrowed(third)
    assert not client.take_back()
    assert is_slot_in_use(other, SLOT), "it is borrowed"
    for neighbour in (RECORDS[0], RECORDS[2]):
        assert SlotLease(fd, neighbour).take_back()
    assert lender.take(), "the attempt has left everything as it was"
    lent_by_who_holds_it = borrowed(third)
    first.give_back()
    first.give_back()
    lender.give_back()
    lent_by_who_holds_it.give_back()
    assert not client.take_back(), "to give back twice is to give back once, and a lender's end is not the loans'"
    second.give_back()
    assert client.take_back()


def test_what_a_client_takes_back_nobody_borrows_and_no_model_executes_in(fd: int, other: int, third: int) -> None:
    client, lender = SlotLease(fd, SLOT), SlotLease(other, SLOT)
    assert client.take_back()
    with no_more_descriptors():
        assert borrow(third, SLOT) is None
    assert not lender.take()
    client.give_back()
    assert lender.take()
    borrowed(third).give_back()
    with pytest.raises(MachineError, match="cannot be taken: No such file or directory$"):
        use(-1)
