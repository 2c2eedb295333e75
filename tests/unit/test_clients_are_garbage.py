"""A client that was closed, or that nobody has any more, is garbage: nothing of the process keeps it, or its memory."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils import forks
from shm_backend_utils.client import ShmClient
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X: Final = np.arange(6, dtype=np.float32)
LONG_S: Final = 20.0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m")) as server:
        yield server


def eventually(is_so: Callable[[], bool]) -> bool:
    """Return whether it comes to be so: a thread that was told to end has to be given the time."""
    deadline = time.monotonic() + LONG_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def parts_of(client: ShmClient) -> list[weakref.ref[Any]]:
    return [weakref.ref(part) for part in (client._core, client._driver, client._memory.pool, client._memory.bank)]


def used(server: FakeServer, *, is_closed: bool) -> list[weakref.ref[Any]]:
    with client_of(server) as client:
        for path in ("direct", "triton-shm", "inline"):
            client.infer("m", {"IN0": X}, path=path)
        parts = parts_of(client)
        if not is_closed:
            client.close = lambda: None  # type: ignore[method-assign]
    return parts


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_client_is_garbage(server: FakeServer, is_closed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # tests/unit/test_unclosed.py
        parts = used(server, is_closed=is_closed)
        assert eventually(lambda: all(part() is None for part in parts)), [part() for part in parts]


def test_what_is_done_in_forked_children_keeps_no_client(server: FakeServer) -> None:
    before = len(forks._OWNERS)
    for _ in range(10):
        used(server, is_closed=True)
    assert eventually(lambda: len(forks._OWNERS) <= before)


def test_results_of_a_client_that_is_garbage_stay_valid(server: FakeServer) -> None:
    with client_of(server) as client:
        result = client.infer("m", {"IN0": X})["OUT0"]
        core = weakref.ref(client._core)
    del client
    assert eventually(lambda: core() is None)
    np.testing.assert_array_equal(result, 2 * X)
