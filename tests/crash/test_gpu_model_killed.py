"""A model is killed whose GPU still works on a request: its client is told in time, and others are served."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.server import EmbeddedServer
from tests.e2e.fake_gpus import DRIVER, X, left_here

from .gate import Gate
from .own_server import serving
from .processes import eventually, stub_of

ON_THE_GPU = (X.shape, X.dtype, "cuda:0")
DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    models = ("fake_gpu", "fake_gpu_events", "fake_gpu_pinned")
    with serving({model: model for model in models}, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("model", ["fake_gpu", "fake_gpu_events"], ids=["which waits", "whose client waits"])
def test_the_client_is_told_in_time_and_others_are_served(server: EmbeddedServer, gate: Gate, model: str) -> None:
    gate.close()
    before = left_here()
    runtime = DRIVER.runtime()
    given = [DRIVER.tensor(X)]
    with ShmClient(server.grpc_url, cuda=CudaAccess(lambda: runtime)) as client:

        def infer(name: str, deed: str, **parameters: Any) -> Any:
            said = {"deed": deed, **parameters}
            return client.infer(
                name, {"X": given[0]}, outputs={"Y": ON_THE_GPU}, parameters=said, path="direct", timeout_s=DEADLINE_S
            )

        infer(model, "double").release()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(infer, model, "launch_what_waits_at_the_gate", **gate.parameters(""))
            gate.wait_for_model()
            stub = stub_of(server, model)
            assert stub is not None
            os.kill(stub, signal.SIGKILL)
            killed = time.monotonic()
            error = call.exception()
            assert isinstance(error, ShmError)
            assert time.monotonic() - killed < 2 * DEADLINE_S
            del call, error
        for number in range(3):
            with infer("fake_gpu_pinned", "double") as result:
                y = result["Y"]
                found = DRIVER.memory(y.address, y.shape, y.dtype).copy()
            np.testing.assert_array_equal(found, X * 2, err_msg=str(number))
            del y
    given.clear()
    eventually(lambda: not runtime.retired.collect() and left_here() == before)
    assert DRIVER.violations() == []
