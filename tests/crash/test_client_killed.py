"""A client is killed, also in a stream: its memory goes, sealed or not, and nobody else notices."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.processes import open_files
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory import locks as lease
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.server import EmbeddedServer

from ..e2e.eventually import eventually
from ..e2e.flavours import url_of
from .gate import Gate
from .processes import held_regions, living_stub_of, open_region_of, region_of, regions_of, standing, stub_of
from .servers import serving

X = np.arange(1000, dtype=np.float32)
VICTIM = str(Path(__file__).with_name("victim.py"))
SWEEP_S = 5.0
A_BUSY_MACHINE_S = 10.0
CASES = [
    ("created", "http", "system"),
    ("writing", "grpc", "sealed"),
    ("in flight", "grpc", "system"),
    ("in flight", "http", "sealed"),
    ("reading", "grpc", "system"),
]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_others_are_served(case: tuple[str, str, str], server: EmbeddedServer, client: ShmClient, gate: Gate) -> None:
    stage, protocol, region = case
    is_model_waiting = stage == "in flight"
    stub, parameters = living_stub_of(server, "crash_stages"), gate.parameters("half written")
    gate.close()
    words = stage, json.dumps(parameters if is_model_waiting else {}), region
    with standing(VICTIM, url_of(server, protocol), *words) as victim:
        if is_model_waiting:
            gate.wait_for_model()
        regions = regions_of(victim.pid)
        assert len(regions) == 1
        with client.infer("identity", {"INPUT0": X}) as before:
            view = before["OUTPUT0"]
        with open_region_of(victim.pid) as fd:  # as another client may remove its name at any time
            assert lease.is_owner_alive(fd)
            victim.kill()
            victim.wait()
            assert not lease.is_owner_alive(fd)
            with ShmClient(server.grpc_url):  # also while a model writes there
                eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
            assert lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE)) is is_model_waiting
            if is_model_waiting:
                gate.let_go()
            eventually(lambda: not lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE)))
    eventually(lambda: not held_regions(stub, regions))
    np.testing.assert_array_equal(view, X)
    is_served(server, client, stub)
    del view


def is_served(server: EmbeddedServer, client: ShmClient, stub: int) -> None:
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], X + 1)
    assert stub_of(server, "crash_stages") == stub
    os.kill(server.pid, 0)


def sockets_of(pid: int) -> set[str]:
    """Return the names of the sockets at which a process hands its regions over."""
    sockets = {name.removeprefix("socket:[").rstrip("]") for name in open_files(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {fields[7] for fields in lines if len(fields) > 7 and fields[6] in sockets}


@pytest.mark.parametrize("stage", ["making", "reading"])
def test_nothing_is_left_of_sealed_memory_anyway(server: EmbeddedServer, client: ShmClient, stage: str) -> None:
    """The victim has called the model before it comes to where it is killed."""
    stub = living_stub_of(server, "crash_stages")
    with standing(VICTIM, server.grpc_url, stage, "{}", "sealed") as victim:
        regions = regions_of(victim.pid)
        assert held_regions(stub, regions)
        assert region_of(victim.pid) is None
        (name,) = sockets_of(victim.pid)
    begin = time.monotonic()
    assert region_of(victim.pid) is None
    assert name not in Path("/proc/net/unix").read_text()
    while held_regions(stub, regions):
        assert time.monotonic() - begin < SWEEP_S + A_BUSY_MACHINE_S
        time.sleep(0.05)
    is_served(server, client, stub)


@pytest.fixture(scope="module")
def stream_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Its model would wait for a client that releases no frame until long after the test."""
    folder = tmp_path_factory.mktemp("streams")
    with serving({"frames_of": "frames_of"}, folder, ('"5"', '"600"')) as server:
        yield server


@pytest.mark.parametrize(("region", "keeps"), [("sealed", "keeps everything"), ("system", "keeps one frame")])
def test_a_stream_ends_and_others_go_on(stream_server: EmbeddedServer, region: RegionName, keeps: str) -> None:
    """The client is in the midst of a stream that has no end."""
    with standing(VICTIM, stream_server.grpc_url, keeps, "{}", region) as victim:
        stub, regions = living_stub_of(stream_server, "frames_of"), regions_of(victim.pid)
        assert len(regions) == 1
        assert {*held_regions(stub, regions)} == regions
    with ShmClient(stream_server.grpc_url, timeout_s=20, pool=PoolOptions(stream_guess_bytes=0)) as client:
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
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
    assert stub_of(stream_server, "frames_of") == stub
