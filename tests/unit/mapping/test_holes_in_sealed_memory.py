"""Holes that a client punches into its sealed memory: seals do not forbid them, and every request looks for them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

PAGE = mmap.PAGESIZE
X = np.arange(1, 1 + PAGE // 4, dtype=np.float32)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        yield session


@pytest.fixture
def client() -> Iterator[Client]:
    with contextlib.closing(Client(kind=RegionKind.SEALED)) as client:
        yield client


def punch_hole(client: Client, offset: int) -> None:
    """Give a page of the region back, as madvise(2) lets everybody who has it mapped."""
    fd = os.open(f"/proc/self/fd/{client.region.segment.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(fd, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, offset, PAGE)
    os.close(fd)


def double(call: Call) -> None:
    x = call.input("X")
    np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())


def test_a_request_after_one_is_refused(session: ShmSession, client: Client) -> None:
    (response,) = session.serve([client.request({"X": X}, {"Y": X.nbytes})], double)
    assert not response.has_error()
    punch_hole(client, client.region.header.byte_size - PAGE)
    (response,) = session.serve([client.request({"X": X}, {"Y": X.nbytes})], double)
    assert message_of(response).startswith("shm:refused: ")
    assert "holes" in message_of(response)
    assert client.is_free()


def test_during_a_request_the_model_reads_zeros_and_goes_on(session: ShmSession, client: Client) -> None:
    def punch_and_double(call: Call) -> None:
        call.input("X")
        punch_hole(client, client.data)
        double(call)

    (response,) = session.serve([client.request({"X": X}, {"Y": X.nbytes})], punch_and_double)
    assert not response.has_error()
    assert not client.output("Y").any()


def test_nobody_can_truncate_it(session: ShmSession, client: Client) -> None:
    fd = client.region.segment.fileno()
    for size in (0, PAGE, client.region.header.byte_size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    (response,) = session.serve([client.request({"X": X}, {"Y": X.nbytes})], double)
    assert not response.has_error()
