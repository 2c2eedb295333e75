"""Memory that a model lends to another one: who may use it, and when its client may take it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.locks import SlotLease, borrow, is_slot_in_use
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset

BORROWER = """
import os, sys
from shm_backend_utils.memory.locks import borrow
fd = os.open(sys.argv[1], os.O_RDWR)
lease = borrow(fd, int(sys.argv[2]))
assert lease is not None
print("borrowed", flush=True)
sys.stdin.read()
"""
SLOT = record_offset(1, PAGE_SIZE)


@pytest.fixture
def client() -> Iterator[int]:
    """The client's description of a region."""
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


def another_description(fd: int) -> Iterator[int]:
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    yield other
    os.close(other)


@pytest.fixture
def lender(client: int) -> Iterator[int]:
    """That of the model which executes the client's request."""
    yield from another_description(client)


@pytest.fixture
def borrower(client: int) -> Iterator[int]:
    """That of the model which the lender calls."""
    yield from another_description(client)


def test_a_client_takes_nothing_back_while_its_memory_is_borrowed(client: int, borrower: int) -> None:
    lease = borrow(borrower, SLOT)
    assert lease is not None
    assert not SlotLease(client, SLOT).take_back()
    lease.give_back()
    assert SlotLease(client, SLOT).take_back()


def test_a_client_takes_nothing_back_from_the_lender(client: int, lender: int) -> None:
    assert SlotLease(lender, SLOT).take()
    assert not SlotLease(client, SLOT).take_back()


def test_an_attempt_to_take_back_leaves_everything_as_it_was(client: int, lender: int, borrower: int) -> None:
    lease = borrow(borrower, SLOT)
    assert lease is not None
    assert not SlotLease(client, SLOT).take_back()
    assert not is_slot_in_use(lender, SLOT)
    assert SlotLease(lender, SLOT).take()
    lease.give_back()


def test_what_a_client_takes_back_nobody_borrows_and_no_model_executes_in(
    client: int, lender: int, borrower: int
) -> None:
    lease = SlotLease(client, SLOT)
    assert lease.take_back()
    assert borrow(borrower, SLOT) is None
    assert not SlotLease(lender, SLOT).take()
    lease.give_back()
    assert SlotLease(lender, SLOT).take()
    again = borrow(borrower, SLOT)
    assert again is not None
    again.give_back()


def test_a_lender_lends_what_it_holds(lender: int, borrower: int) -> None:
    assert SlotLease(lender, SLOT).take()
    lease = borrow(borrower, SLOT)
    assert lease is not None
    lease.give_back()


def test_a_lender_may_hold_what_is_borrowed_already(lender: int, borrower: int) -> None:
    lease = borrow(borrower, SLOT)
    assert lease is not None
    assert SlotLease(lender, SLOT).take()
    lease.give_back()


def test_that_the_lender_is_done_does_not_end_the_loan(client: int, lender: int, borrower: int) -> None:
    lenders = SlotLease(lender, SLOT)
    assert lenders.take()
    lease = borrow(borrower, SLOT)
    assert lease is not None
    lenders.give_back()
    assert not SlotLease(client, SLOT).take_back()
    lease.give_back()


def test_several_may_borrow_at_once_even_through_one_description(client: int, borrower: int) -> None:
    first, second = borrow(borrower, SLOT), borrow(borrower, SLOT)
    assert first is not None
    assert second is not None
    first.give_back()
    assert not SlotLease(client, SLOT).take_back()
    second.give_back()
    assert SlotLease(client, SLOT).take_back()


def test_giving_back_twice_gives_back_once(client: int, borrower: int) -> None:
    first, second = borrow(borrower, SLOT), borrow(borrower, SLOT)
    assert first is not None
    assert second is not None
    first.give_back()
    first.give_back()
    assert not SlotLease(client, SLOT).take_back()
    second.give_back()


def test_a_loan_of_one_slot_is_none_of_its_neighbours(client: int, borrower: int) -> None:
    lease = borrow(borrower, SLOT)
    assert lease is not None
    for neighbour in (SLOT - PAGE_SIZE, SLOT + PAGE_SIZE):
        assert SlotLease(client, neighbour).take_back()
    lease.give_back()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_loan_ends_with_the_process_that_has_it(client: int, end: str) -> None:
    path = f"/proc/{os.getpid()}/fd/{client}"
    command = [sys.executable, "-c", BORROWER, path, str(SLOT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"borrowed\n"
        lease = SlotLease(client, SLOT)
        assert not lease.take_back()
        if end == "kill":
            process.send_signal(signal.SIGKILL)
        process.communicate()
        assert lease.take_back()


def test_no_descriptor_is_left_of_a_loan_that_was_not_to_be_had(client: int, borrower: int) -> None:
    assert SlotLease(client, SLOT).take_back()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count is all that is wanted
    assert borrow(borrower, SLOT) is None
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
