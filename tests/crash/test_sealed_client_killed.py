"""A client with sealed memory is killed: nothing is left of it, also where no client ever starts again."""

from __future__ import annotations

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
from shm_backend_utils.server import EmbeddedServer

from .processes import held_regions, regions_of, stub_of

SHM = Path("/dev/shm")
X = np.arange(1000, dtype=np.float32)
SWEEP_S = 5.0
A_BUSY_MACHINE_S = 10.0


@pytest.fixture(params=["making", "reading"])
def victim(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[subprocess.Popen[str]]:
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


def desks_of(pid: int) -> set[str]:
    """Return the names of the sockets at which a process hands its regions over."""
    sockets = {name.removeprefix("socket:[").rstrip("]") for name in open_files(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {fields[7] for fields in lines if len(fields) > 7 and fields[6] in sockets}


def test_its_memory_goes_and_no_name(server: EmbeddedServer, client: ShmClient, victim: subprocess.Popen[str]) -> None:
    stub = stub_of(server, "crash_stages")
    assert stub is not None
    regions = regions_of(victim.pid)
    assert held_regions(stub, regions)
    assert named_of(victim.pid) == []
    (desk,) = desks_of(victim.pid)
    victim.kill()
    victim.wait()
    begin = time.monotonic()
    assert named_of(victim.pid) == []
    assert desk not in Path("/proc/net/unix").read_text()
    while held_regions(stub, regions):
        assert time.monotonic() - begin < SWEEP_S + A_BUSY_MACHINE_S
        time.sleep(0.05)
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], X + 1)
    assert stub_of(server, "crash_stages") == stub
    os.kill(server.pid, 0)
