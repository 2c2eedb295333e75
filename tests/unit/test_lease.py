"""Leases: who holds one, who sees it, who may use what is lent, and when the kernel takes it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.locks import (
    SharedLease,
    SlotLease,
    borrow,
    exclude_reapers,
    hold_owner_lease,
    is_owner_alive,
    is_slot_in_use,
    use,
)
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset

RECORDS = [record_offset(slot, PAGE_SIZE) for slot in range(3)]
"""Where the records of a region's slots begin: the bytes of their leases."""
SLOT = RECORDS[1]
HOLDER = f"""
import os, sys
from shm_backend_utils.memory.locks import SlotLease, borrow, hold_owner_lease
fd = os.open(sys.argv[1], os.O_RDWR)
hold_owner_lease(fd)
assert SlotLease(fd, {SLOT}).take()
lease = borrow(fd, {RECORDS[2]})
assert lease is not None
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
def third(fd: int) -> Iterator[int]:
    """A third description: that of a model which another one calls."""
    third = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    yield third
    os.close(third)


@pytest.fixture
def holder(fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process: it holds the owner's lease and slot 1's, and borrows slot 2, until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"/proc/{os.getpid()}/fd/{fd}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def borrowed(fd: int) -> SharedLease:
    lease = borrow(fd, SLOT)
    assert lease is not None
    return lease


def test_an_owner_is_seen_through_another_description_alone(fd: int, other: int) -> None:
    assert not is_owner_alive(fd)
    for _ in range(2):
        hold_owner_lease(fd)
        assert not is_owner_alive(fd)
        assert is_owner_alive(other)
    with pytest.raises(AssertionError, match="somebody holds the lease"):
        hold_owner_lease(other)


def test_one_reaper_excludes_the_next_until_it_is_done_and_is_no_owner(fd: int, other: int) -> None:
    reaper = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert exclude_reapers(reaper)
    assert not exclude_reapers(other)
    os.close(reaper)
    assert exclude_reapers(other)
    assert not is_owner_alive(fd)
    hold_owner_lease(fd)
    assert is_owner_alive(other)


@pytest.mark.parametrize("is_killed", [False, True], ids=["exit", "kill"])
def test_leases_and_loans_of_another_process_go_with_it(
    fd: int, holder: subprocess.Popen[bytes], is_killed: bool
) -> None:
    lease, lent = SlotLease(fd, SLOT), SlotLease(fd, RECORDS[2])
    assert is_owner_alive(fd)
    assert is_slot_in_use(fd, SLOT)
    assert not lease.take()
    assert not lent.take_back()
    if is_killed:
        holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert not is_owner_alive(fd)
    assert lease.take()
    assert lent.take_back()


# Memory that a model lends to another one


def test_a_client_takes_nothing_back_while_its_memory_is_borrowed(fd: int, other: int, third: int) -> None:
    client, lender = SlotLease(fd, SLOT), SlotLease(other, SLOT)
    first, second = borrowed(third), borrowed(third)
    assert not client.take_back()
    assert not is_slot_in_use(other, SLOT), "the attempt has left everything as it was"
    for neighbour in (RECORDS[0], RECORDS[2]):
        assert SlotLease(fd, neighbour).take_back()
    assert lender.take()
    first.give_back()
    lender.give_back()
    assert not client.take_back()
    second.give_back()
    assert client.take_back()


def test_a_lender_lends_what_it_holds_and_its_end_is_not_the_loans(fd: int, other: int, third: int) -> None:
    client, lender = SlotLease(fd, SLOT), SlotLease(other, SLOT)
    assert lender.take()
    assert not client.take_back()
    lease = borrowed(third)
    lender.give_back()
    assert not client.take_back()
    lease.give_back()
    assert client.take_back()


def test_what_a_client_takes_back_nobody_borrows_and_no_model_executes_in(fd: int, other: int, third: int) -> None:
    client, lender = SlotLease(fd, SLOT), SlotLease(other, SLOT)
    assert client.take_back()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count is all that is wanted
    assert borrow(third, SLOT) is None
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert not lender.take()
    client.give_back()
    assert lender.take()
    borrowed(third).give_back()


def test_giving_back_twice_gives_back_once(fd: int, third: int) -> None:
    first, second = borrowed(third), borrowed(third)
    first.give_back()
    first.give_back()
    assert not SlotLease(fd, SLOT).take_back()
    second.give_back()


# Without descriptors


def test_another_failure_than_that_is_not_said_to_be_one() -> None:
    with pytest.raises(MachineError, match="cannot be taken: No such file or directory$"):
        use(-1)
