"""A client is killed: its memory goes, sealed or not, and nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.processes import open_files
from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory import locks as lease
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.server import EmbeddedServer

from ..e2e.flavours import url_of
from .gate import Gate
from .processes import eventually, held_regions, open_region_of, region_of, regions_of, stub_of

X = np.arange(1000, dtype=np.float32)
CASES = [
    ("created", "http", "system"),
    ("writing", "grpc", "sealed"),
    ("in flight", "grpc", "system"),
    ("in flight", "http", "sealed"),
    ("reading", "grpc", "system"),
]


class Victim:
    """A client process that stands at a stage."""

    def __init__(self, url: str, stage: str, gate: Gate, region: RegionName) -> None:
        self._gate = gate
        self.is_model_waiting = stage == "in flight"
        gate.close()
        parameters = gate.parameters("half written") if self.is_model_waiting else {}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py")), url, stage, json.dumps(parameters), region],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "here\n"
        if self.is_model_waiting:
            gate.wait_for_model()
        self.regions = regions_of(self.pid)
        assert len(self.regions) == 1

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def let_the_model_go(self) -> None:
        if self.is_model_waiting:
            self.is_model_waiting = False
            self._gate.let_go()


@pytest.fixture
def victim(server: EmbeddedServer, gate: Gate, request: pytest.FixtureRequest) -> Iterator[Victim]:
    stage, protocol, region = request.param
    victim = Victim(url_of(server, protocol), stage, gate, region)
    yield victim
    victim.kill()
    victim.let_the_model_go()


@pytest.mark.parametrize("victim", CASES, indirect=True, ids=", ".join)
def test_its_memory_goes_and_others_are_served(victim: Victim, server: EmbeddedServer, client: ShmClient) -> None:
    stub = stub_of(server, "crash_stages")
    assert stub is not None
    with client.infer("identity", {"INPUT0": X}) as before:
        view = before["OUTPUT0"]
    with open_region_of(victim.pid) as fd:  # as another client may remove its name at any time
        assert lease.is_owner_alive(fd)
        victim.kill()
        assert not lease.is_owner_alive(fd)
        with ShmClient(server.grpc_url):  # also while a model writes there
            eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
        assert lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE)) is victim.is_model_waiting
        victim.let_the_model_go()
        eventually(lambda: not lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE)))
    eventually(lambda: not held_regions(stub, victim.regions))
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as after:
        np.testing.assert_array_equal(after["Y"], X + 1)
    np.testing.assert_array_equal(view, X)
    assert stub_of(server, "crash_stages") == stub
    os.kill(server.pid, 0)
    del view


SHM = Path("/dev/shm")
SWEEP_S = 5.0
A_BUSY_MACHINE_S = 10.0


@pytest.fixture(params=["making", "reading"])
def sealed_victim(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[subprocess.Popen[str]]:
    """One that has called the model before it comes to where it is killed."""
    victim_py = Path(__file__).with_name("victim.py")
    command = [sys.executable, str(victim_py), server.grpc_url, request.param, "{}", "sealed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "here\n"
        yield victim
        victim.kill()


def named_of(pid: int) -> list[Path]:
    return list(SHM.glob(f"shmbu-{pid}-*"))


def sockets_of(pid: int) -> set[str]:
    """Return the names of the sockets at which a process hands its regions over."""
    sockets = {name.removeprefix("socket:[").rstrip("]") for name in open_files(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {fields[7] for fields in lines if len(fields) > 7 and fields[6] in sockets}


def test_nothing_is_left_of_sealed_memory_also_where_no_client_starts_again(
    server: EmbeddedServer, client: ShmClient, sealed_victim: subprocess.Popen[str]
) -> None:
    stub = stub_of(server, "crash_stages")
    assert stub is not None
    regions = regions_of(sealed_victim.pid)
    assert held_regions(stub, regions)
    assert named_of(sealed_victim.pid) == []
    (name,) = sockets_of(sealed_victim.pid)
    sealed_victim.kill()
    sealed_victim.wait()
    begin = time.monotonic()
    assert named_of(sealed_victim.pid) == []
    assert name not in Path("/proc/net/unix").read_text()
    while held_regions(stub, regions):
        assert time.monotonic() - begin < SWEEP_S + A_BUSY_MACHINE_S
        time.sleep(0.05)
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], X + 1)
    assert stub_of(server, "crash_stages") == stub
    os.kill(server.pid, 0)
