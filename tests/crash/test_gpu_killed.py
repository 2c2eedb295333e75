"""A client or a model is killed whose GPU is at work: the memory is closed, and others are told in time and served."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.server import EmbeddedServer
from tests.e2e.fake_gpus import DRIVER, MODEL, Told, X, content_of, flavour_of, gpu_of, left_here, told_by
from tests.releases import outlives_models
from tests.unit.gpu.fakes import stream_on

from ..e2e.eventually import eventually
from .gate import Gate
from .processes import held_regions, kill_stub, living_stub_of, region_of, regions_of, standing
from .servers import serving

BEGIN = """
import json, sys
import numpy as np
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

driver, parameters = FakeDriver.load(), json.loads(sys.argv[2])
"""
VICTIM = """
client = ShmClient(sys.argv[1], pool=PoolOptions(region=sys.argv[3]))
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
WAITER = """
client = ShmClient(sys.argv[1])
place = ((1000,), np.float32, "cuda:0")
call = client.prepare("fake_gpu_events", {"X": place}, outputs={"Y": place}, parameters=parameters, path="direct")
print("here", flush=True)
call.infer(cuda_stream=driver.runtime().create_stream(0)).release()
"""
END = """
print("here, too", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def victim_of(
    server: EmbeddedServer,
    gate: Gate,
    is_model_at_work: bool,
    program: str = VICTIM,
    deed: str = "double",
    region: str = "system",
) -> Iterator[subprocess.Popen[str]]:
    """Run a client whose model has its memory open, and maybe stands at a gate, until it is killed."""
    gate.close()
    parameters = {**gate.parameters(""), "deed": "double_behind_the_gate" if is_model_at_work else deed}
    with standing("-c", BEGIN + program + END, server.grpc_url, json.dumps(parameters), region) as victim:
        if is_model_at_work:
            gate.wait_for_model()
        else:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "here, too\n"
        yield victim


@pytest.fixture
def before(triton_server: EmbeddedServer) -> Told:
    """What the model tells before there is a victim."""
    return told_by(MODEL, triton_server.grpc_url, "let_go")


def test_the_model_and_the_next_client_leave_nothing(triton_server: EmbeddedServer, gate: Gate, before: Told) -> None:
    url = triton_server.grpc_url
    with victim_of(triton_server, gate, False) as victim:  # whose region's name could be left behind
        regions = regions_of(victim.pid)
        assert region_of(victim.pid) is not None
        assert told_by(MODEL, url).open_now == before.open_now + 1
    eventually(lambda: told_by(MODEL, url).open_now == before.open_now)
    assert held_regions(living_stub_of(triton_server, MODEL), regions) == []
    with gpu_of(flavour_of(triton_server)) as gpu, gpu.infer("double", gpu.array(X)) as result:
        assert (content_of(result["Y"]) == X * 2).all()
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it


@pytest.mark.parametrize("region", ["system", "sealed"])
def test_a_model_at_work_closes_it_later(triton_server: EmbeddedServer, gate: Gate, before: Told, region: str) -> None:
    with victim_of(triton_server, gate, True, region=region) as victim:
        pass
    with ShmClient(triton_server.grpc_url):
        eventually(lambda: region_of(victim.pid) is None)  # another client may be at it
    gate.let_go()
    after = told_by(MODEL, triton_server.grpc_url, "sweep")
    assert (after.launched, after.finished) == (before.launched + 1, before.finished + 1)
    assert after.open_now == before.open_now


@pytest.mark.parametrize("is_model_at_work", [True, False], ids=["during the request", "while the model keeps it"])
def test_lenders_may_be_killed(triton_server: EmbeddedServer, gate: Gate, before: Told, is_model_at_work: bool) -> None:
    url = triton_server.grpc_url
    with victim_of(triton_server, gate, is_model_at_work, LENDER, "keep"):
        if not is_model_at_work:  # at the gate, the model answers nobody
            assert told_by(MODEL, url).open_now > before.open_now
    if is_model_at_work:
        gate.let_go()
    after = told_by(MODEL, url, "let_go")
    eventually(lambda: told_by(MODEL, url, "let_go").open_now == before.open_now)
    assert after.violations == before.violations
    with gpu_of(flavour_of(triton_server)) as gpu, gpu.infer("double", gpu.array(X)) as result:
        assert (content_of(result["Y"]) == X * 2).all()


def test_a_client_may_be_killed_after_an_early_answer(triton_server: EmbeddedServer, gate: Gate) -> None:
    url, model = triton_server.grpc_url, "fake_gpu_events"
    before = told_by(model, url, "let_go")
    with victim_of(triton_server, gate, False, WAITER, "launch_what_waits_at_the_gate") as victim:
        gate.wait_for_model()
    with ShmClient(url):
        eventually(lambda: region_of(victim.pid) is None)
    assert told_by(model, url, "tell").finished == before.finished
    gate.let_go()
    eventually(lambda: told_by(model, url, "sweep").open_now == before.open_now)
    after = told_by(model, url)
    assert (after.finished, after.violations) == (before.finished + 2, before.violations)


ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    models = {model: model for model in ("fake_gpu", "fake_gpu_events", "fake_gpu_pinned")}
    with serving({**models, "waited_for": "fake_gpu_events"}, tmp_path_factory.mktemp("server")) as server:
        yield server


Infer = Callable[..., Any]


@contextlib.contextmanager
def asking(server: EmbeddedServer) -> Iterator[tuple[CudaRuntime, Infer]]:
    """Run a client whose tensor is on a GPU, and see that nothing of it is left here."""
    before, runtime, given = left_here(), DRIVER.runtime(), [DRIVER.tensor(X)]
    with ShmClient(server.grpc_url, cuda=CudaAccess(lambda: runtime)) as client:

        def infer(name: str, deed: str, parameters: Mapping[str, str] = MappingProxyType({}), **options: Any) -> Any:
            options |= {"outputs": {"Y": ON_THE_GPU}, "parameters": {"deed": deed, **parameters}, "path": "direct"}
            return client.infer(name, {"X": given[0]}, **options)

        yield runtime, infer
    given.clear()
    eventually(lambda: not runtime.retired.collect() and left_here() == before)
    assert DRIVER.violations() == []


@outlives_models
@pytest.mark.parametrize("model", ["fake_gpu", "fake_gpu_events"], ids=["which waits", "whose client waits"])
def test_the_client_is_told_in_time_and_others_are_served(server: EmbeddedServer, gate: Gate, model: str) -> None:
    gate.close()
    with asking(server) as (_, infer):
        infer(model, "double").release()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(
                infer, model, "launch_what_waits_at_the_gate", gate.parameters(""), timeout_s=DEADLINE_S
            )
            gate.wait_for_model()
            kill_stub(server, model)
            killed = time.monotonic()
            assert isinstance(call.exception(), ShmError)
            assert time.monotonic() - killed < 2 * DEADLINE_S
            del call
        for _ in range(3):
            with infer("fake_gpu_pinned", "double") as result:
                assert (content_of(result["Y"]) == X * 2).all()


@outlives_models
def test_a_stream_that_waits_for_a_killed_model_goes_on(server: EmbeddedServer, gate: Gate) -> None:
    """Another model has the memory mapped, too, and lives."""
    gate.close()
    with asking(server) as (runtime, infer), stream_on(runtime) as stream:
        infer("fake_gpu_pinned", "double", cuda_stream=stream).release()
        infer("waited_for", "double", cuda_stream=stream).release()
        left = infer("waited_for", "launch_what_waits_at_the_gate", gate.parameters(""), cuda_stream=stream)
        gate.wait_for_model()
        with runtime.on(0):
            assert not runtime.is_stream_done(stream)
        kill_stub(server, "waited_for")
        killed = time.monotonic()
        runtime.synchronize_stream(stream, 0)
        assert time.monotonic() - killed < 1
        address = left["Y"].address
        left.release()
        with infer("fake_gpu_pinned", "double", cuda_stream=stream) as result:
            runtime.synchronize_stream(stream, 0)
            assert result["Y"].address != address
            assert (content_of(result["Y"]) == X * 2).all()
