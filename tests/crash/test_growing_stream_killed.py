"""A client is killed in a stream whose frames had got more room: the model lets go of both regions, which then go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

from .own_server import serving
from .processes import eventually, held_regions, regions_of, stub_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Its model would wait for a client that releases no frame until long after the test."""
    folder = tmp_path_factory.mktemp("growing")
    with serving({"frames_of": "frames_of"}, folder, ('"5"', '"600"')) as server:
        yield server


@pytest.fixture(params=["everything", "one frame"])
def victim(
    server: EmbeddedServer, request: pytest.FixtureRequest, region: RegionName
) -> Iterator[subprocess.Popen[str]]:
    """A client that is in the midst of a stream which has no end, and has grown."""
    victim_py = Path(__file__).with_name("stream_victim.py")
    command = [sys.executable, str(victim_py), server.grpc_url, region, request.param, "grows"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "here\n"
        yield victim
        victim.kill()


def left_by(owner: int) -> list[str]:
    return [report.key for report in reaper.scan() if report.key.startswith(f"shmbu-{owner}-")]


def test_the_model_lets_go_of_both_regions_and_the_next_client_is_served(
    server: EmbeddedServer, victim: subprocess.Popen[str]
) -> None:
    stub = stub_of(server, "frames_of")
    assert stub is not None
    regions = regions_of(victim.pid)
    assert len(regions) == 2
    assert {*held_regions(stub, regions)} == regions
    victim.kill()
    assert victim.wait() < 0
    with ShmClient(server.grpc_url, timeout_s=20, pool=PoolOptions(stream_guess_bytes=0)) as client:
        eventually(lambda: not left_by(victim.pid))
        parameters = {"count": 5}
        values = []
        for result in client.stream(
            "frames_of", {"X": np.ones(8, np.float32)}, outputs=["Y"], parameters=parameters, frames=1
        ):
            with result:
                values.append((float(result["Y"][0]), bool(result.overflowed)))
        assert values == [(1, True), (2, False), (3, False), (4, False), (5, False)]
    eventually(lambda: not held_regions(stub, regions))
    assert stub_of(server, "frames_of") == stub
