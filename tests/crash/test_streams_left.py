"""Streams that are left early: the server lives, however often, and the client can be closed at once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.server import EmbeddedServer
from tests.checked_calls import IMAGE, stream
from tests.e2e.flavours import AwaitedClient, Flavour

from .conftest import ROOT
from .servers import serving

OFTEN = 250
X = np.ones(4, np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("streams")
    shutil.copytree(ROOT / "model_repository" / "frames", folder / "models" / "frames")
    with serving({"countdown": "countdown"}, folder) as server:
        yield server


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
@pytest.mark.parametrize("path", ["direct", "inline"])
def test_the_server_lives(server: EmbeddedServer, path: PathName, is_aio: bool) -> None:
    """Triton crashes when a stream is cancelled while a response is written: after some 20 to 200 of these streams."""
    with Flavour(server.grpc_url, is_aio).client() as client:
        for number in range(OFTEN):
            results = client.stream("frames", {"IMAGE": IMAGE}, path=path)
            for _ in range(number % 3):
                next(results)
            results.close()  # type: ignore[attr-defined]  # it is a generator
        assert isinstance(client, AwaitedClient) or stream(client)
    assert server.is_running


async def leave_in_a_task(url: str, path: PathName) -> None:
    async with AsyncShmClient(url, inline_bytes=0) as client:
        async for _ in client.stream("frames", {"IMAGE": IMAGE}, path=path):
            break


def leave(url: str, path: PathName) -> None:
    with ShmClient(url, inline_bytes=0) as client:
        results = client.stream("frames", {"IMAGE": IMAGE}, path=path)
        next(results)
    with contextlib.suppress(ClosedError):  # unless all had come
        list(results)


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
@pytest.mark.parametrize("path", ["direct", "inline"])
def test_the_server_lives_when_clients_are_closed(server: EmbeddedServer, path: PathName, is_aio: bool) -> None:
    for _ in range(OFTEN // 2):
        if is_aio:
            asyncio.run(leave_in_a_task(server.grpc_url, path))
        else:
            leave(server.grpc_url, path)
    assert server.is_running


LEFT_OPEN = """
import asyncio, sys
import numpy as np
from shm_backend_utils.client import AsyncShmClient, ShmClient

X = {"X": np.ones(4, np.float32)}

async def main():
    results = AsyncShmClient(sys.argv[1]).stream("countdown", X)
    await results.__anext__()
    keep.append(results)

keep = []
if sys.argv[2] == "aio":
    asyncio.run(main())
else:
    keep.append(ShmClient(sys.argv[1]).stream("countdown", X))
    next(keep[0])
"""


@pytest.mark.parametrize("way", ["blocking", "aio"])
def test_a_program_ends_that_has_closed_neither_stream_nor_client(server: EmbeddedServer, way: str) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, server.grpc_url, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "pending" in done.stderr) == (0, False), done.stderr
    with Flavour(server.grpc_url, is_aio=False).client() as client:  # the model has one instance
        assert len(list(client.stream("countdown", {"X": X}, parameters={"count": 3}))) == 3


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_a_stream_without_an_end_ends_with_its_client(server: EmbeddedServer, is_aio: bool) -> None:
    with Flavour(server.grpc_url, is_aio).client() as client:
        results = client.stream("countdown", {"X": X})
        next(results)
        results.close()  # type: ignore[attr-defined]  # it is a generator
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    with Flavour(server.grpc_url, is_aio).client() as client:  # the model has one instance
        results = client.stream("countdown", {"X": X}, parameters={"count": 3})
        assert len(list(results)) == 3
