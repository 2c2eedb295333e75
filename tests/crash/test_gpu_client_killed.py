"""A client is killed whose memory of a GPU a model has open: the model closes it, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer
from tests.e2e.fake_gpus import MODEL, Told, X, content_of, flavour_of, gpu_of, told_by

from .gate import Gate
from .processes import eventually, held_regions, region_of, regions_of, stub_of

BEGIN = """
import json, sys
import numpy as np
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

driver, parameters = FakeDriver.load(), json.loads(sys.argv[2])
"""
VICTIM = """
client = ShmClient(sys.argv[1], pool=PoolOptions(region="system"))  # whose names could be left behind
place = ((1000,), np.float32, "cuda:0")
call = client.prepare("fake_gpu", {"X": place}, outputs={"Y": place}, parameters=parameters, path="direct")
x = call.inputs["X"]
driver.memory(x.address, x.shape, x.dtype)[:] = 1
print("here", flush=True)
y = call.infer()["Y"]
assert (driver.memory(y.address, y.shape, y.dtype) == 2).all()
"""
LENDER = """
client = ShmClient(sys.argv[1])
x = driver.tensor(np.ones(1 << 19, np.float32))
print("here", flush=True)
client.infer("fake_gpu", {"X": x}, outputs={"Y": "cuda:0"}, parameters=parameters, path="direct").release()
"""
END = """
print("here, too", flush=True)
sys.stdin.read()
"""


class Victim:
    """A client process whose model has its memory open, and maybe stands at a gate."""

    def __init__(
        self, server: EmbeddedServer, gate: Gate, is_model_at_work: bool, program: str = VICTIM, deed: str = "double"
    ) -> None:
        gate.close()
        if is_model_at_work:
            deed = "double_behind_the_gate"
        parameters = {**gate.parameters(""), "deed": deed}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + program + END, server.grpc_url, json.dumps(parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._says("here\n")
        if is_model_at_work:
            gate.wait_for_model()
        else:
            self._says("here, too\n")

    def _says(self, line: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def before(triton_server: EmbeddedServer) -> Told:
    """What the model tells before there is a victim."""
    return told_by(MODEL, triton_server.grpc_url, "let_go")


def test_the_model_closes_the_memory_by_itself_and_nothing_is_left_when_the_next_client_has_started(
    triton_server: EmbeddedServer, gate: Gate, before: Told
) -> None:
    url = triton_server.grpc_url
    with contextlib.closing(Victim(triton_server, gate, is_model_at_work=False)) as victim:
        regions = regions_of(victim.pid)
        assert region_of(victim.pid) is not None
        assert told_by(MODEL, url).open_now == before.open_now + 1
    eventually(lambda: told_by(MODEL, url).open_now == before.open_now)
    stub = stub_of(triton_server, MODEL)
    assert stub is not None
    assert held_regions(stub, regions) == []
    with gpu_of(flavour_of(triton_server)) as gpu, gpu.infer("double", gpu.array(X)) as result:
        assert (content_of(result["Y"]) == X * 2).all()
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it


def test_a_model_that_is_at_work_comes_to_its_end_and_closes_the_memory_then(
    triton_server: EmbeddedServer, gate: Gate, before: Told
) -> None:
    with contextlib.closing(Victim(triton_server, gate, is_model_at_work=True)) as victim:
        pass
    with ShmClient(triton_server.grpc_url):
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
    gate.let_go()
    after = told_by(MODEL, triton_server.grpc_url, "sweep")
    assert (after.launched, after.finished) == (before.launched + 1, before.finished + 1)
    assert after.open_now == before.open_now


@pytest.mark.parametrize("is_model_at_work", [True, False], ids=["during the request", "while the model keeps it"])
def test_a_client_may_be_killed_that_has_lent_its_own_tensor(
    triton_server: EmbeddedServer, gate: Gate, before: Told, is_model_at_work: bool
) -> None:
    url = triton_server.grpc_url
    with contextlib.closing(Victim(triton_server, gate, is_model_at_work, LENDER, "keep")):
        if not is_model_at_work:  # at the gate, the model answers nobody
            assert told_by(MODEL, url).open_now > before.open_now
    if is_model_at_work:
        gate.let_go()
    after = told_by(MODEL, url, "let_go")
    eventually(lambda: told_by(MODEL, url, "let_go").open_now == before.open_now)
    assert after.violations == before.violations
    with gpu_of(flavour_of(triton_server)) as gpu, gpu.infer("double", gpu.array(X)) as result:
        assert (content_of(result["Y"]) == X * 2).all()
