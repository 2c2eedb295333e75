"""Streams that are left early: the server lives, however often, and the client can be closed at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from tests.checked_calls import IMAGE, stream
from tests.e2e.flavours import Flavour, LoopedClient

from .conftest import ROOT
from .own_server import serving

OFTEN = 250


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
        assert isinstance(client, LoopedClient) or stream(client)
    assert server.is_running


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_a_stream_without_an_end_ends_with_its_client(server: EmbeddedServer, is_aio: bool) -> None:
    with Flavour(server.grpc_url, is_aio).client() as client:
        results = client.stream("countdown", {"X": IMAGE[:4, 0, 0].astype("f4")})
        next(results)
        results.close()  # type: ignore[attr-defined]  # it is a generator
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    with Flavour(server.grpc_url, is_aio).client() as client:  # the model has one instance
        results = client.stream("countdown", {"X": IMAGE[:4, 0, 0].astype("f4")}, parameters={"count": 3})
        assert len(list(results)) == 3
