"""A model is killed that has lent its client's memory to another one: the client must not use it too early."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, PreparedCall, ShmClient
from shm_backend_utils.errors import SlotInDoubtError
from shm_backend_utils.server import EmbeddedServer
from tests.releases import outlives_models

from ..e2e.eventually import eventually
from .gate import Gate
from .processes import kill_stub, region_of, stub_of
from .servers import serving

X = np.arange(1000, dtype=np.float32)
COPIES = ("killed_while_writing", "killed_before_it_began", "killed_on_its_own", "killed_at_rest")
"""The caller, once for each test: a stub that was killed does not come back."""

pytestmark = outlives_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    models = {"crash_stages": "crash_stages", **dict.fromkeys(COPIES, "delegate")}
    with serving(models, tmp_path_factory.mktemp("forwarding")) as server:
        yield server


class Scene:
    """A call whose model has called `crash_stages`, which stands at the gate when the caller is killed."""

    def __init__(
        self, server: EmbeddedServer, client: ShmClient, caller: str, way: str, stage: str, gate: Gate
    ) -> None:
        parameters = {"way": way, "model": "crash_stages", **gate.parameters(stage)}
        outputs = {"Y": X.nbytes, "FACTS": 4096}
        self.call: PreparedCall = client.prepare(
            caller, {"X": (X.shape, X.dtype)}, outputs=outputs, parameters=parameters
        )
        self.call.inputs["X"][:] = 0
        self.y: npt.NDArray[Any] = self.call.infer()["Y"]
        self.call.inputs["X"][:] = X
        gate.close()
        errors: list[Exception] = []

        def infer() -> None:
            try:
                self.call.infer()
            except InferenceError as error:
                errors.append(error)

        thread = threading.Thread(target=infer)
        thread.start()
        gate.wait_for_model()
        kill_stub(server, caller)
        thread.join()
        assert [str(error) for error in errors] != []
        errors.clear()

    def close(self) -> None:
        self.call.close()
        del self.y


def test_memory_is_not_used_while_another_model_writes(server: EmbeddedServer, client: ShmClient, gate: Gate) -> None:
    scene = Scene(server, client, "killed_while_writing", "forward_into", "half written", gate)
    middle = len(X) // 2
    np.testing.assert_array_equal(scene.y[:middle], X[:middle] + 1)
    assert not (scene.y[middle:] == X[middle:] + 1).any()
    with pytest.raises(SlotInDoubtError):
        scene.call.infer()
    scene.close()
    eventually(lambda: client.stats().quarantined == 1)
    gate.let_go()
    eventually(lambda: client.stats().quarantined == 0)
    assert client.stats().slots_idle == 1


def test_a_model_that_comes_too_late_touches_no_memory(server: EmbeddedServer, client: ShmClient, gate: Gate) -> None:
    scene = Scene(server, client, "killed_before_it_began", "forward_into", "not begun", gate)
    memory = scene.y
    scene.call.inputs["X"][:] = 7
    memory[:] = 9
    gate.let_go()
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:  # it has one instance
        np.testing.assert_array_equal(result["Y"], X + 1)
    assert (memory == 9).all()
    del memory
    scene.close()
    eventually(lambda: client.stats().slots_held == 0 == client.stats().quarantined)


def test_what_the_caller_had_of_its_own_is_its_own(server: EmbeddedServer, client: ShmClient, gate: Gate) -> None:
    """Neither input nor output of the other model is the client's: its memory is free while that one goes on."""
    scene = Scene(server, client, "killed_on_its_own", "forward_own", "half written", gate)
    scene.close()
    eventually(lambda: client.stats().quarantined == 0 == client.stats().slots_held)
    gate.let_go()
    with client.infer("crash_stages", {"X": X}, outputs={"Y": X.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], X + 1)


def test_scratch_memory_of_a_killed_model_goes_with_the_next_client(server: EmbeddedServer, client: ShmClient) -> None:
    with client.infer("killed_at_rest", {"X": X}, parameters={"way": "forward_own", "model": "crash_stages"}) as result:
        pid = json.loads(result["FACTS"].tobytes())["pid"]
    assert stub_of(server, "killed_at_rest") == pid
    assert region_of(pid) is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: stub_of(server, "killed_at_rest") is None)
    with ShmClient(server.grpc_url):
        eventually(lambda: region_of(pid) is None)  # another client may be at it
