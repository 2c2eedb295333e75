"""Leases: who holds one, who sees it, who may use what is lent, and when the kernel takes it away."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.descriptors import NoDescriptorsError
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
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.protocol.spans import InputSpan, Table
from tests.unit.emulated import delivered, error_code, log_lines, message_of
from tests.unit.modes.doubling import FP32, X
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

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
    """Borrow slot 1, which must be possible."""
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


def test_a_duplicate_keeps_the_owners_lease_until_it_is_closed_too(fd: int) -> None:
    owner = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    hold_owner_lease(owner)
    duplicate = os.dup(owner)
    os.close(owner)
    assert is_owner_alive(fd)
    os.close(duplicate)
    assert not is_owner_alive(fd)


def test_a_slots_lease_is_taken_once_seen_by_others_and_of_that_slot_alone(fd: int, other: int) -> None:
    mine = SlotLease(fd, SLOT)
    assert not is_slot_in_use(other, SLOT)
    assert mine.take()
    assert not mine.take()
    assert (is_slot_in_use(fd, SLOT), is_slot_in_use(other, SLOT)) == (False, True)
    assert not is_slot_in_use(other, RECORDS[2])
    assert not is_owner_alive(other)
    assert SlotLease(other, RECORDS[0]).take()


def test_a_failed_attempt_leaves_the_lease_free(fd: int) -> None:
    closed = os.dup(fd)
    os.close(closed)
    lease = SlotLease(closed, RECORDS[0])
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            lease.take()


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


@contextlib.contextmanager
def no_descriptors() -> Iterator[int]:
    """Have none left, of as many as there are said to be."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    most = lowest_free + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield most
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("take", [use, lambda fd: borrow(fd, PAGE_SIZE)], ids=["use", "borrow"])
def test_no_descriptor_for_a_lease_is_an_error_of_the_machine(
    fd: int, take: Callable[[int], SharedLease | None]
) -> None:
    with no_descriptors() as most, pytest.raises(MachineError) as raised:
        take(fd)
    assert isinstance(raised.value, NoDescriptorsError)
    assert f"none left of {most}" in str(raised.value)
    lease = take(fd)
    assert lease is not None
    lease.give_back()


def test_another_failure_than_that_is_not_said_to_be_one() -> None:
    with pytest.raises(MachineError, match="cannot be taken: No such file or directory$"):
        use(-1)


def test_a_model_that_cannot_borrow_for_lack_of_descriptors_refuses_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        contextlib.closing(Client()) as lender,
        contextlib.closing(Client()) as client,
        session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session,
    ):
        header, at = client.region.header, client.data
        np.ndarray((4,), np.float32, client.region.bytes(), at)[...] = X
        claim = LentRegionClaim(client.region.segment.key, header.byte_size, header.token.hex(), 0)
        said = Table({"X": InputSpan(FP32, (4,), 1, at, 16)}, {}, (claim,))
        (response,) = session.serve(
            [delivered(lender.begin(said))], lambda call: call.input("X")
        )  # from here on all is mapped
        assert response.error() is None
        request = delivered(lender.begin(said))
        with no_descriptors():
            (response,) = session.serve([request], lambda call: call.input("X"))
        assert response.error() is not None
        assert (error_code(response), message_of(response).partition(": ")[0]) == ("UNAVAILABLE", "shm:machine")
        assert log_lines() == []
        assert lender.region.record(0).started == 1
        assert lender.is_free()
        assert client.is_free()
        (response,) = session.serve([request], lambda call: call.input("X"))
        assert response.error() is None
