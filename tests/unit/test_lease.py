"""Leases: who holds one, who sees it, and when the kernel takes it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shm_backend_utils.memory.locks import (
    SlotLease,
    exclude_reapers,
    hold_owner_lease,
    is_owner_alive,
    is_slot_in_use,
)
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset

RECORDS = [record_offset(slot, PAGE_SIZE) for slot in range(3)]
"""Where the records of a region's slots begin: the bytes of their leases."""

HOLDER = f"""
import os, sys
from shm_backend_utils.memory.locks import SlotLease, hold_owner_lease
fd = os.open(sys.argv[1], os.O_RDWR)
hold_owner_lease(fd)
assert SlotLease(fd, {RECORDS[1]}).take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fd() -> Iterator[int]:
    """An open description of a file that has no name."""
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


@pytest.fixture
def other(fd: int) -> Iterator[int]:
    """Another description of the same file: what another process would have."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    yield other
    os.close(other)


@pytest.fixture
def holder(fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which holds the owner's lease and that of slot 1 until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"/proc/{os.getpid()}/fd/{fd}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def test_nobody_owns_a_new_file(fd: int) -> None:
    assert not is_owner_alive(fd)


def test_the_owners_lease_is_seen_through_another_description(fd: int, other: int) -> None:
    hold_owner_lease(fd)
    assert is_owner_alive(other)


def test_the_owner_does_not_see_its_own_lease(fd: int) -> None:
    hold_owner_lease(fd)
    assert not is_owner_alive(fd)


def test_the_owner_may_take_its_lease_again(fd: int) -> None:
    hold_owner_lease(fd)
    hold_owner_lease(fd)


def test_one_reaper_excludes_the_next_until_it_is_done(fd: int, other: int) -> None:
    reaper = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert exclude_reapers(reaper)
    assert not exclude_reapers(other)
    os.close(reaper)
    assert exclude_reapers(other)


def test_a_reaper_does_not_pass_for_the_owner(fd: int, other: int) -> None:
    assert exclude_reapers(other)
    assert not is_owner_alive(fd)
    hold_owner_lease(fd)
    assert is_owner_alive(other)


def test_who_must_have_the_owners_lease_is_told_that_it_is_taken(fd: int, other: int) -> None:
    hold_owner_lease(fd)
    with pytest.raises(AssertionError, match="somebody holds the lease"):
        hold_owner_lease(other)


def test_a_duplicate_keeps_the_owners_lease_until_it_is_closed_too(fd: int) -> None:
    owner = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    hold_owner_lease(owner)
    duplicate = os.dup(owner)
    os.close(owner)
    assert is_owner_alive(fd)
    os.close(duplicate)
    assert not is_owner_alive(fd)


def test_asking_for_the_owner_takes_nothing(fd: int, other: int) -> None:
    assert not is_owner_alive(fd)
    hold_owner_lease(other)


def test_asking_for_a_slot_takes_nothing(fd: int, other: int) -> None:
    assert not is_slot_in_use(fd, RECORDS[0])
    assert SlotLease(other, RECORDS[0]).take()


def test_a_slot_is_seen_in_use_through_another_description(fd: int, other: int) -> None:
    assert SlotLease(fd, RECORDS[2]).take()
    assert is_slot_in_use(other, RECORDS[2])


def test_the_holder_of_a_slot_does_not_see_its_own_lease(fd: int) -> None:
    assert SlotLease(fd, RECORDS[0]).take()
    assert not is_slot_in_use(fd, RECORDS[0])


def test_a_slots_lease_is_taken_once_between_descriptions(fd: int, other: int) -> None:
    assert SlotLease(fd, RECORDS[0]).take()
    assert not SlotLease(other, RECORDS[0]).take()


def test_a_slots_lease_is_taken_once_within_a_process(fd: int) -> None:
    lease = SlotLease(fd, RECORDS[0])
    assert lease.take()
    assert not lease.take()


def test_a_slots_lease_can_be_taken_when_it_was_given_back(fd: int, other: int) -> None:
    lease = SlotLease(fd, RECORDS[0])
    assert lease.take()
    lease.give_back()
    assert not is_slot_in_use(other, RECORDS[0])
    assert lease.take()


def test_a_lease_that_was_not_to_be_had_can_be_taken_later(fd: int, other: int) -> None:
    mine, theirs = SlotLease(fd, RECORDS[0]), SlotLease(other, RECORDS[0])
    assert theirs.take()
    assert not mine.take()
    theirs.give_back()
    assert mine.take()


def test_slots_have_leases_of_their_own(fd: int, other: int) -> None:
    assert SlotLease(fd, RECORDS[0]).take()
    assert SlotLease(other, RECORDS[1]).take()
    assert not is_slot_in_use(fd, RECORDS[2])


def test_a_slots_lease_is_not_the_owners(fd: int, other: int) -> None:
    assert SlotLease(fd, RECORDS[0]).take()
    assert not is_owner_alive(other)


def test_one_of_many_threads_gets_the_lease(fd: int) -> None:
    lease = SlotLease(fd, RECORDS[0])
    together = threading.Barrier(8)

    def take(_: int) -> bool:
        together.wait()
        return lease.take()

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 1


def test_threads_with_a_lease_never_meet(fd: int) -> None:
    lease = SlotLease(fd, RECORDS[0])
    inside: list[int] = []

    def come_and_go(thread: int) -> int:
        entered = 0
        while entered < 200:
            if lease.take():
                inside.append(thread)
                assert inside == [thread]
                inside.remove(thread)
                lease.give_back()
                entered += 1
        return entered

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(come_and_go, range(4))) == [200] * 4


def test_a_failed_attempt_leaves_the_lease_free(fd: int) -> None:
    closed = os.dup(fd)
    os.close(closed)
    lease = SlotLease(closed, RECORDS[0])
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            lease.take()


@pytest.mark.usefixtures("holder")
def test_another_process_excludes_this_one(fd: int) -> None:
    assert is_owner_alive(fd)
    assert is_slot_in_use(fd, RECORDS[1])
    assert not SlotLease(fd, RECORDS[1]).take()


def test_leases_go_with_a_process_that_ends(fd: int, holder: subprocess.Popen[bytes]) -> None:
    holder.communicate()
    assert not is_owner_alive(fd)
    assert SlotLease(fd, RECORDS[1]).take()


def test_leases_go_with_a_process_that_is_killed(fd: int, holder: subprocess.Popen[bytes]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_owner_alive(fd)
    assert SlotLease(fd, RECORDS[1]).take()


def test_a_forked_child_keeps_its_parents_lease_alive(fd: int, other: int) -> None:
    """The child has the parent's description: as long as it runs, an owner seems alive, and nothing is removed."""
    owner = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    hold_owner_lease(owner)
    stay, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(stay, 1)
        os._exit(0)
    os.close(stay)
    os.close(owner)
    seen = is_owner_alive(other)
    os.close(go)
    os.waitpid(child, 0)
    assert seen
    assert not is_owner_alive(other)


def test_a_program_that_the_owner_starts_does_not_inherit_its_lease(fd: int) -> None:
    owner = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    hold_owner_lease(owner)
    with subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, close_fds=False
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(b"x")
        assert program.stdout.read(1) == b"x"  # only now is it sure to have replaced its copy of this process
        os.close(owner)
        assert not is_owner_alive(fd)
