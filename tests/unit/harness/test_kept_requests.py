"""Models that keep a request and never answer it, and harnesses that end: nobody waits for long, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.client.options import Tls
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.testing.harness import Faults, ModelHarness
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.unit.fake_gpu import wait_until
from tests.unit.harness.folders import folder_of
from tests.unit.harness.wires import MODELS

KEEPING = """
    import pathlib
    import triton_python_backend_utils as pb_utils
    NOTES = pathlib.Path(__file__).parent
    class TritonPythonModel:
        def initialize(self, args):
            self.kept = []
        def execute(self, requests):
            if any(request.is_cancelled() for request in self.kept):
                (NOTES / "cancelled").touch()
            self.kept += requests
            self.senders = [request.get_response_sender() for request in self.kept]
            (NOTES / "executed").touch()
"""
X = {"X": np.arange(4, dtype=np.float32)}
ENOUGH_S = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path, KEEPING)


@pytest.fixture(params=[ModelHarness, ModelHarness.in_child], ids=["here", "child"])
def harness(request: pytest.FixtureRequest, folder: Path) -> Iterator[ModelHarness]:
    with request.param(folder, patience_s=0.2) as made:
        yield made


def in_time(act: Callable[[], object]) -> None:
    """Do something that may not hang."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(ENOUGH_S)
    assert not thread.is_alive()


def test_a_client_closes_after_its_deadline(harness: ModelHarness) -> None:
    client = ShmClient(harness)
    with pytest.raises(DeadlineExceededError):
        client.infer("m", X, path="inline", timeout_s=0.2)
    in_time(client.close)


def test_a_client_that_closes_ends_its_calls(harness: ModelHarness, folder: Path) -> None:
    client = ShmClient(harness)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.infer, "m", X, path="inline", timeout_s=60)
        wait_until((folder / "1" / "executed").exists)
        in_time(client.close)
        assert isinstance(call.exception(ENOUGH_S), ClosedError)


def test_an_asynchronous_client_closes_after_its_deadline(harness: ModelHarness) -> None:
    async def call() -> None:
        async with AsyncShmClient(harness) as client:
            with pytest.raises(DeadlineExceededError):
                await client.infer("m", X, path="inline", timeout_s=0.2)

    in_time(lambda: asyncio.run(call()))


def test_the_model_knows_that_nobody_waits(harness: ModelHarness, folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            harness.infer(X)
    assert (folder / "1" / "cancelled").exists()


def test_a_model_that_is_unloaded_answers_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import kept
        class TritonPythonModel:
            def execute(self, requests):
                kept.senders.put([request.get_response_sender() for request in requests])
    """
    kept: Any = ModuleType("kept")
    kept.senders = queue.SimpleQueue()
    monkeypatch.setitem(sys.modules, "kept", kept)
    with ThreadPoolExecutor(1) as threads, ModelHarness(folder_of(tmp_path, code)) as harness:
        call = threads.submit(harness.infer, X)
        _senders = kept.senders.get(timeout=ENOUGH_S)
        harness._open().unload("m")
        with pytest.raises(InferenceError, match="model 'm' was unloaded before it answered"):
            call.result(ENOUGH_S)


IDENTITY = Path(__file__).resolve().parents[3] / "model_repository" / "identity"
INPUTS = {"INPUT0": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
def test_descriptors_threads_and_memory_are_given_back(make: type[ModelHarness]) -> None:
    def call_all_paths() -> None:
        with make(IDENTITY) as harness, ShmClient(harness) as client:
            for path in ("direct", "triton-shm", "inline"):
                client.infer("identity", INPUTS, path=path).release()

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
        harness.infer(INPUTS)
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


def test_statistics_count_requests_rows_and_errors(tmp_path: Path) -> None:
    pool = PoolOptions(region="system")  # else a request tries whether the model can fetch sealed memory
    with ModelHarness(IDENTITY) as harness, ShmClient(harness, pool=pool) as client:
        for _ in range(3):
            client.infer("identity", INPUTS, path="inline")
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
            answer = threads.submit(harness.infer, {"X": INPUTS["INPUT0"]})
            while not answer.running():
                threading.Event().wait(0.001)
            threading.Event().wait(0.05)
        assert answer.result()["Y"].tolist() == INPUTS["INPUT0"].tolist()


def test_faults_of_real_stubs_can_be_switched_on() -> None:
    with ModelHarness(IDENTITY, faults=Faults(is_stub_for_numpy_1=True)) as harness, ShmClient(harness) as client:
        for path in ("direct", "inline"):  # a session does without NumPy's arrays there
            with client.infer("identity", INPUTS, path=path) as result:
                np.testing.assert_array_equal(result["OUTPUT0"], INPUTS["INPUT0"])
    with ModelHarness(MODELS / "behaving", faults=Faults(is_stub_for_numpy_1=True)) as harness:
        assert harness.infer({"X": INPUTS["INPUT0"]}, outputs=["Y"])["Y"].size == 0  # and without a word
