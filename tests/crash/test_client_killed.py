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

from .gate import Gate
from .processes import eventually, held_regions, open_region_of, region_of, regions_of, stub_of

STAGES = ("created", "writing", "in flight", "reading")
X = np.arange(1000, dtype=np.float32)


class Victim:
    """A client process that stands at a stage."""

    def __init__(self, url: str, stage: str, gate: Gate, region: RegionName) -> None:
        self._gate = gate
        self._is_model_waiting = stage == "in flight"
        gate.close()
        parameters = gate.parameters("half written") if self._is_model_waiting else {}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py")), url, stage, json.dumps(parameters), region],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "here\n"
        if self._is_model_waiting:
            gate.wait_for_model()
        self.regions = regions_of(self.pid)
        assert len(self.regions) == 1

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def let_the_model_go(self) -> None:
        if self._is_model_waiting:
            self._is_model_waiting = False
            self._gate.let_go()

    def end(self) -> None:
        self.kill()
        self.let_the_model_go()


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def victim(url: str, stage: str, gate: Gate, region: RegionName) -> Iterator[Victim]:
    victim = Victim(url, stage, gate, region)
    yield victim
    victim.end()
    with ShmClient(url):
        pass  # removes what the victim left


@pytest.mark.parametrize("region", ["system"])
def test_the_next_client_to_start_removes_the_region(victim: Victim, url: str) -> None:
    before = region_of(victim.pid)
    assert before is not None
    assert before.is_owner_alive
    victim.kill()
    with ShmClient(url):
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it


@pytest.mark.parametrize("stage", ["writing", "in flight", "reading"])
def test_the_model_lets_go_of_the_memory_by_itself(victim: Victim, server: EmbeddedServer) -> None:
    stub = stub_of(server, "crash_stages")
    assert stub is not None
    assert held_regions(stub, victim.regions)
    victim.kill()
    victim.let_the_model_go()
    eventually(lambda: not held_regions(stub, victim.regions))
    assert stub_of(server, "crash_stages") == stub


def test_another_client_is_served_as_before(victim: Victim, client: ShmClient) -> None:
    with client.infer("identity", {"INPUT0": X}) as before:
        view = before["OUTPUT0"]
    victim.kill()
    victim.let_the_model_go()
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as after:
        np.testing.assert_array_equal(after["Y"], X + 1)
    np.testing.assert_array_equal(view, X)
    del view


@pytest.mark.parametrize("stage", ["in flight"])
def test_the_model_holds_the_slot_until_it_is_done(victim: Victim) -> None:
    with open_region_of(victim.pid) as fd:  # as another client may remove its name at any time
        victim.kill()
        assert not lease.is_owner_alive(fd)
        assert lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE))
        victim.let_the_model_go()
        eventually(lambda: not lease.is_slot_in_use(fd, record_offset(0, PAGE_SIZE)))


@pytest.mark.parametrize("stage", ["in flight"])
def test_a_region_may_be_removed_while_a_model_writes_to_it(
    victim: Victim, server: EmbeddedServer, client: ShmClient
) -> None:
    stub = stub_of(server, "crash_stages")
    victim.kill()
    with ShmClient(server.grpc_url):
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
    victim.let_the_model_go()
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], X + 1)
    assert stub_of(server, "crash_stages") == stub
    os.kill(server.pid, 0)
