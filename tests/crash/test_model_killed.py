"""A model's stub process is killed: the call fails, and its memory is the client's again.

Triton 2.51 does not start a dead stub again. So the server is restarted before the memory is used once more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.faults.servers import free_ports

from ..e2e.own_regions import own_regions
from .gate import Gate
from .processes import eventually, held_regions, infer_until_answered, regions_of, stub_of

X = np.arange(1000, dtype=np.float32)
SCENES = (
    ("not begun", "grpc", "sealed"),
    ("half written", "grpc", "system"),
    ("half written", "http", "sealed"),
    ("stamped", "grpc", "system"),
)


class Story:
    """One client before, during and after the death of a model at a stage; it keeps what it saw."""

    def __init__(self, stage: str, protocol: str, region: RegionName, models: Path, folder: Path) -> None:
        self.stage = stage
        gate = Gate(folder)
        ports = free_ports()
        log_file = folder / "server.log"
        me = os.getpid()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(EmbeddedServer.start(models, ports=ports, log_file=log_file))
            url = {"grpc": server.grpc_url, "http": f"http://{server.http_url}"}[protocol]
            client = stack.enter_context(ShmClient(url, timeout_s=60, pool=PoolOptions(region=region)))
            call = client.prepare(
                "crash_stages", {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}, parameters=gate.parameters(stage)
            )
            call.inputs["X"][:] = X
            call.infer().release()  # the model has mapped the region, whatever it is killed at
            gate.close()
            with ThreadPoolExecutor(1) as executor:
                answer = executor.submit(call.infer)
                gate.wait_for_model()
                self.slots_before = slots_in_use()
                stub = stub_of(server, "crash_stages")
                assert stub is not None
                os.kill(stub, signal.SIGKILL)
                self.error = answer.exception()
            self.slots_after = slots_in_use()
            with ShmClient(url) as other, other.infer("identity", {"INPUT0": X}) as result:
                self.result_of_another_model = result["OUTPUT0"].copy()
            self.does_server_live = server.is_running
            _kill(server)
            server = stack.enter_context(EmbeddedServer.start(models, ports=ports, log_file=log_file))
            call.inputs["X"][:] = 5 * X
            with infer_until_answered(call) as result:
                self.result_in_the_same_memory = result["Y"].copy()
            new_stub = stub_of(server, "crash_stages")
            assert new_stub is not None
            regions = regions_of(me)
            assert held_regions(new_stub, regions)
            call.close()
            client.close()
            eventually(lambda: not held_regions(new_stub, regions))
            _kill(server)
        self.left_by_the_client = own_regions()


def _kill(server: EmbeddedServer) -> None:
    """End a server that would wait half a minute for its dead stub if it was asked to stop."""
    os.kill(server.pid, signal.SIGKILL)
    server.wait()


def slots_in_use() -> list[bool]:
    """Return of each region of this process whether a model holds its slot's lease."""
    opened = [Descriptor(os.open, f"/proc/self/fd/{region.fileno()}", os.O_RDWR) for region in own_regions()]
    return [locks.is_slot_in_use(each.fileno(), record_offset(0, PAGE_SIZE)) for each in opened]


@pytest.fixture(scope="module", params=SCENES, ids=", ".join)
def story(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    stage, protocol, region = request.param
    return Story(stage, protocol, region, models, tmp_path_factory.mktemp("story"))


def test_the_client_is_told(story: Story) -> None:
    assert isinstance(story.error, InferenceError)
    assert "is not healthy" in str(story.error)


def test_a_lease_goes_with_its_model(story: Story) -> None:
    assert story.slots_before == [story.stage == "half written"]
    assert story.slots_after == [False]


def test_other_models_are_not_disturbed(story: Story) -> None:
    np.testing.assert_array_equal(story.result_of_another_model, X)
    assert story.does_server_live


def test_the_next_call_in_the_same_memory_is_right(story: Story) -> None:
    np.testing.assert_array_equal(story.result_in_the_same_memory, 5 * X + 1)


def test_nothing_is_left_when_the_client_has_gone(story: Story) -> None:
    assert story.left_by_the_client == []
