"""What harnesses leave behind: nothing. And clients of one that is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient
from shm_backend_utils.client.options import Tls
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.testing.harness import Faults, ModelHarness
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.unit.fake_gpu import wait_until
from tests.unit.harness.folders import folder_of
from tests.unit.harness.wires import MODELS

IDENTITY = Path(__file__).resolve().parents[3] / "model_repository" / "identity"
X = {"INPUT0": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
def test_descriptors_threads_and_memory_are_given_back(make: type[ModelHarness]) -> None:
    def call_all_paths() -> None:
        with make(IDENTITY) as harness, ShmClient(harness) as client:
            for path in ("direct", "triton-shm", "inline"):
                client.infer("identity", X, path=path).release()

    call_all_paths()  # modules are imported, and executors of the interpreter's made
    gc.collect()
    descriptors, threads = len(list(Path("/proc/self/fd").iterdir())), set(threading.enumerate())
    with ShmLeakProbe(pool_prefix=None):
        call_all_paths()
        gc.collect()
    # There may be fewer: those that close sockets stay for a second, after the first calls as well as the second.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    wait_until(lambda: threads.issuperset(threading.enumerate()))


def test_a_closed_harness_says_so() -> None:
    harness = ModelHarness(IDENTITY)
    assert repr(harness) == "<ModelHarness 'identity' open>"
    client = ShmClient(harness)
    assert repr(client) == "<ShmClient <ModelHarness 'identity' open> path=auto open>"
    client.close()
    harness.close()
    harness.close()
    assert repr(harness) == "<ModelHarness 'identity' closed>"
    with pytest.raises(ClosedError):
        harness.infer(X)
    with pytest.raises(ClosedError):
        ShmClient(harness)


def test_a_harness_speaks_no_tls() -> None:
    with ModelHarness(IDENTITY) as harness, pytest.raises(CallerError, match="is without TLS"):
        ShmClient(harness, tls=Tls())


def test_a_harness_that_nobody_closed_is_told() -> None:
    with pytest.warns(ResourceWarning, match="the ModelHarness made"):
        _make_and_forget()


def _make_and_forget() -> None:
    harness = ModelHarness(IDENTITY)
    server = harness._open()
    del harness
    gc.collect()
    server.close()


def test_clients_wait_as_long_as_they_like(tmp_path: Path) -> None:
    code = """
        import time
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                while not requests[0].is_cancelled() and requests[0].parameters() == "{}":
                    time.sleep(0.5)
                    break
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())])]
    """
    with ModelHarness(folder_of(tmp_path, code)) as harness:
        with ShmClient(harness) as client, pytest.raises(TimeoutError):
            client.infer("m", {"X": X["INPUT0"]}, timeout_s=0.1)

        async def call() -> None:
            async with AsyncShmClient(harness) as client:
                with pytest.raises(TimeoutError):
                    await client.infer("m", {"X": X["INPUT0"]}, timeout_s=0.1)

        asyncio.run(call())


def test_statistics_count_requests_rows_and_errors(tmp_path: Path) -> None:
    pool = PoolOptions(region="system")  # else a request tries whether the model can fetch sealed memory
    with ModelHarness(IDENTITY) as harness, ShmClient(harness, pool=pool) as client:
        for _ in range(3):
            client.infer("identity", X, path="inline")
        (told,) = client.get_inference_statistics("identity")["model_stats"]
        assert (told["inference_count"], told["execution_count"]) == (3, 3)
        assert told["inference_stats"]["success"]["count"] == 3


def test_finalize_waits_for_what_is_executed(tmp_path: Path) -> None:
    code = """
        import time
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            ended = False
            def execute(self, requests):
                time.sleep(0.2)
                assert not self.ended
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())])]
            def finalize(self):
                self.ended = True
    """
    with ThreadPoolExecutor(1) as threads:
        with ModelHarness(folder_of(tmp_path, code)) as harness:
            answer = threads.submit(harness.infer, {"X": X["INPUT0"]})
            while not answer.running():
                threading.Event().wait(0.001)
            threading.Event().wait(0.05)
        assert answer.result()["Y"].tolist() == X["INPUT0"].tolist()


def test_faults_of_real_stubs_can_be_switched_on() -> None:
    with ModelHarness(IDENTITY, faults=Faults(is_stub_for_numpy_1=True)) as harness, ShmClient(harness) as client:
        for path in ("direct", "inline"):  # a session does without NumPy's arrays there
            with client.infer("identity", X, path=path) as result:
                np.testing.assert_array_equal(result["OUTPUT0"], X["INPUT0"])
    with ModelHarness(MODELS / "behaving", faults=Faults(is_stub_for_numpy_1=True)) as harness:
        assert harness.infer({"X": X["INPUT0"]}, outputs=["Y"])["Y"].size == 0  # and without a word
