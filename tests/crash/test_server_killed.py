"""The server is killed in the middle of a call, and comes back on the same ports."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, PreparedCall, ServerUnavailableError, ShmClient
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.faults.servers import free_ports

from ..e2e.own_regions import own_regions
from .gate import Gate
from .processes import infer_until_answered, stub_of

SHM = Path("/dev/shm")
X = np.arange(1000, dtype=np.float32)


class Story:
    """One client over one protocol, before, during and after its server's death; it keeps what it saw."""

    def __init__(self, protocol: str, region: RegionName, models: Path, folder: Path) -> None:
        gate = Gate(folder)
        gate.close()
        ports = free_ports()
        log_file = folder / "server.log"
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(EmbeddedServer.start(models, ports=ports, log_file=log_file))
            url = {"grpc": server.grpc_url, "http": f"http://{server.http_url}"}[protocol]
            client = stack.enter_context(ShmClient(url, timeout_s=60, pool=PoolOptions(region=region)))
            view = client.infer("identity", {"INPUT0": X})["OUTPUT0"]
            call = stack.enter_context(_prepare(client, gate))
            with ThreadPoolExecutor(1) as executor:
                answer = executor.submit(call.infer)
                gate.wait_for_model()
                stub = stub_of(server, "crash_stages")
                _kill(server)
                self.error_in_flight = answer.exception()
            self.left_by_the_server = [*SHM.glob(f"{server.shm_prefix}*"), *Path("/proc").glob(str(stub))]
            self.view_afterwards = view.copy()
            self.error_without_a_server = _error_of(client)
            server = stack.enter_context(EmbeddedServer.start(models, ports=ports, log_file=log_file))
            call.inputs["X"][:] = 5 * X
            self.result_in_the_same_memory = infer_until_answered(call)["Y"].copy()
            with client.infer("identity", {"INPUT0": 3 * X}) as result:
                self.result_of_the_same_client = result["OUTPUT0"].copy()
            _kill(server)
        self.left_by_the_client = own_regions()


def _prepare(client: ShmClient, gate: Gate) -> PreparedCall:
    parameters = gate.parameters("half written")
    call = client.prepare("crash_stages", {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}, parameters=parameters)
    call.inputs["X"][:] = X
    return call


def _kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.wait()


def _error_of(client: ShmClient) -> BaseException | None:
    try:
        client.infer("identity", {"INPUT0": X})
    except Exception as error:
        return error.with_traceback(None)
    return None


@pytest.fixture(scope="module", params=[("grpc", "sealed"), ("http", "sealed"), ("http", "system")], ids=", ".join)
def story(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    protocol, region = request.param
    return Story(protocol, region, models, tmp_path_factory.mktemp("story"))


def test_a_call_in_flight_is_told_that_the_server_has_gone(story: Story) -> None:
    assert isinstance(story.error_in_flight, ServerUnavailableError), repr(story.error_in_flight)


def test_a_call_without_a_server_is_told_that_there_is_none(story: Story) -> None:
    assert isinstance(story.error_without_a_server, ServerUnavailableError), repr(story.error_without_a_server)


def test_the_servers_stubs_and_shared_memory_go_with_it(story: Story) -> None:
    assert story.left_by_the_server == []


def test_a_result_stays_what_it_was(story: Story) -> None:
    np.testing.assert_array_equal(story.view_afterwards, X)


def test_the_same_call_is_right_in_the_same_memory_when_the_server_is_back(story: Story) -> None:
    np.testing.assert_array_equal(story.result_in_the_same_memory, 5 * X + 1)


def test_the_same_client_works_when_the_server_is_back(story: Story) -> None:
    np.testing.assert_array_equal(story.result_of_the_same_client, 3 * X)


def test_the_client_leaves_nothing(story: Story) -> None:
    assert story.left_by_the_client == []
