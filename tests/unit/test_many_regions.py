"""More regions than a model has file descriptors for, and larger ones than it can map."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import error_code, log_lines, message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)
OPEN = Path("/proc/self/fd")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        yield session


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in OPEN.iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def pass_on(call: Call) -> None:
    call.put("Y", call.input("X"))


def test_regions_that_nobody_uses_make_room_for_others(session: ShmSession) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(Client())) for _ in range(24)]
        with descriptors_left(13):
            for _ in range(2):
                for client in clients:
                    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], pass_on)
                    assert response.error() is None
                    np.testing.assert_array_equal(client.output("Y"), X)


def test_no_descriptor_at_all_is_an_error_of_the_machine(session: ShmSession) -> None:
    with contextlib.closing(Client()) as client:
        request = client.request({"X": X}, {"Y": 16})
        with descriptors_left(0):
            taken = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            (response,) = session.serve([request], pass_on)
            for descriptor in taken:
                os.close(descriptor)
        assert (error_code(response), message_of(response).partition(": ")[0]) == ("UNAVAILABLE", "shm:machine")
        assert log_lines() == []
        (response,) = session.serve([request], pass_on)
        assert response.error() is None
