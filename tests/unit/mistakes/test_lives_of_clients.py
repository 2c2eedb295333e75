"""Clients, calls and results that are used too late, by others, or twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CallerError, ClosedError, PoolOptions, ShmClient
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import async_client_of, client_of, connected

X = np.ones(3, np.float32)
DESCRIBED: Any = {"IN0": ((3,), np.float32)}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m")) as server:
        yield server


def uses(client: ShmClient) -> list[Any]:
    return [
        lambda: client.infer("m", {"IN0": X}),
        lambda: client.submit("m", {"IN0": X}),
        lambda: client.prepare("m", DESCRIBED),
        lambda: client.stream("m", {"IN0": X}),
        lambda: client.explain("m"),
        client.stats,
        client.__enter__,
    ]


def test_a_client_that_is_closed(server: FakeServer) -> None:
    with client_of(server) as client:
        pass
    for use in uses(client):
        with pytest.raises(ClosedError) as error:
            use()
        assert str(error.value) == "this client is closed; make a new one"


def test_a_result_that_is_released_and_arrays_that_were_kept(server: FakeServer) -> None:
    with client_of(server) as client:
        with client.infer("m", {"IN0": X}) as result:
            kept = result["OUT0"]
        with pytest.raises(ClosedError) as error:
            result["OUT0"]
        assert str(error.value) == (
            "this result is closed; take arrays from it before its with block ends, or release(): they stay valid"
        )
    assert kept.tolist() == [2, 2, 2], "an array is valid as long as it lives, also when all is closed"


def test_a_client_in_two_event_loops(server: FakeServer) -> None:
    async def make() -> Any:
        async with async_client_of(server) as client:
            with pytest.raises(CallerError) as error:
                await asyncio.to_thread(asyncio.run, infer(client))
            return str(error.value)

    async def infer(client: Any) -> None:
        await client.infer("m", {"IN0": X})

    assert asyncio.run(make()) == "this client belongs to another event loop; make one client in each loop"


@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")
def test_a_cell_that_is_run_twice(server: FakeServer) -> None:
    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")}

    before = names()
    for _ in range(2):
        client = connected(server, pool=PoolOptions(region="system"))
        call = client.prepare("m", DESCRIBED)
        call.inputs["IN0"][...] = X
        result = call.infer()
    assert result["OUT0"].tolist() == [2, 2, 2]
    assert len(names() - before) == 1, "the first client's memory went with the client"
    client.close()
    assert names() == before
