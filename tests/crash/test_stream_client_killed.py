"""A client is killed in its stream: the model's generator ends, its memory goes, and the next client is served."""

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
    folder = tmp_path_factory.mktemp("streams")
    with serving({"frames_of": "frames_of"}, folder, ('"5"', '"600"')) as server:
        yield server


def left_by(owner: int) -> list[str]:
    return [report.key for report in reaper.scan() if report.key.startswith(f"shmbu-{owner}-")]


@pytest.mark.parametrize(("region", "keeps"), [("sealed", "everything"), ("system", "one frame")])
def test_a_stream_ends_and_others_go_on(server: EmbeddedServer, region: RegionName, keeps: str) -> None:
    """The client is in the midst of a stream that has no end."""
    victim_py = Path(__file__).with_name("stream_victim.py")
    command = [sys.executable, str(victim_py), server.grpc_url, region, keeps]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "here\n"
        stub, regions = stub_of(server, "frames_of"), regions_of(victim.pid)
        assert stub is not None
        assert len(regions) == 1
        assert {*held_regions(stub, regions)} == regions
        victim.kill()
    with ShmClient(server.grpc_url, timeout_s=20, pool=PoolOptions(stream_guess_bytes=0)) as client:
        eventually(lambda: not left_by(victim.pid))  # another client may be at it
        (result,) = client.stream("frames_of", {}, outputs=["BEGUN_AND_ENDED"], parameters={"way": "ask"})
        begun, ended = result["BEGUN_AND_ENDED"].tolist()  # the model has one instance
        assert begun == ended
        frames = client.stream(
            "frames_of", {"X": np.ones(8, np.float32)}, outputs=["Y"], parameters={"count": 5}, frames=1
        )
        values = []
        for frame in frames:
            with frame:
                values.append(float(frame["Y"][0]))
        assert values == [1, 2, 3, 4, 5]
    eventually(lambda: not held_regions(stub, regions))
    assert stub_of(server, "frames_of") == stub
