"""A client is killed: its memory goes, and nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory import locks as lease
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.server import EmbeddedServer

from .either_client import url_of
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
