"""A lease of one's own takes a file descriptor: a process that has none left is told so."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.descriptors import NoDescriptorsError
from shm_backend_utils.memory.locks import SharedLease, borrow, use
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.spans import InputSpan, Table
from tests.unit.emulated import delivered, error_code, log_lines, message_of
from tests.unit.modes.doubling import FP32, X
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


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


@pytest.fixture
def fd() -> Iterator[int]:
    """An open description of a file that has no name."""
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


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
    with pytest.raises(FileNotFoundError):
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
