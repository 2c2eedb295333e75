"""A client is killed in its stream: the model's generator ends, its memory goes, and the next client is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import Result, ShmClient
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

from .own_server import serving
from .processes import eventually, held_regions, region_of, regions_of, stub_of

LONGER_THAN_THE_TEST = '"600"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Its model would wait for a client that releases no frame until long after the test."""
    folder = tmp_path_factory.mktemp("streams")
    with serving({"frames_of": "frames_of"}, folder, ('"1"', LONGER_THAN_THE_TEST)) as server:
        yield server


@pytest.fixture(params=["everything", "one frame"])
def keeps(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def victim(server: EmbeddedServer, keeps: str, region: RegionName) -> Iterator[subprocess.Popen[str]]:
    """A client that is in the midst of a stream which has no end."""
    command = [sys.executable, str(Path(__file__).with_name("stream_victim.py")), server.grpc_url, region, keeps]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "here\n"
        yield victim
        victim.kill()


def test_the_stream_ends_and_the_next_client_is_served(server: EmbeddedServer, victim: subprocess.Popen[str]) -> None:
    stub = stub_of(server, "frames_of")
    assert stub is not None
    regions = regions_of(victim.pid)
    assert held_regions(stub, regions)
    victim.kill()
    assert victim.wait() < 0
    with ShmClient(server.grpc_url, timeout_s=20) as client:
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
        begun, ended = ask(client)  # the model has one instance
        assert begun == ended
        assert [result.copy()["Y"][0] for result in frames(client, 5)] == [1, 2, 3, 4, 5]
    eventually(lambda: not held_regions(stub, regions))
    assert stub_of(server, "frames_of") == stub


def ask(client: ShmClient) -> list[int]:
    (result,) = client.stream("frames_of", {}, outputs=["BEGUN_AND_ENDED"], parameters={"way": "ask"})
    told: list[int] = result["BEGUN_AND_ENDED"].tolist()
    return told


def frames(client: ShmClient, count: int) -> Iterator[Result]:
    return client.stream("frames_of", {"X": np.ones(8, np.float32)}, outputs={"Y": 32}, parameters={"count": count})
