"""Which requests a harness has executed together; models that keep one and never answer it, and harnesses that end."""

from __future__ import annotations

import gc
import queue
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.testing.harness import ModelHarness, Request
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.unit.gpu.fakes import wait_until
from tests.unit.harness.folders import folder_of

COUNTING = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            rows = sum(len(request.inputs()[0].as_numpy()) for request in requests)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[len(requests), rows]], np.int32))])
                for request in requests
            ]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { %s }
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] %s } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""


def rows(count: int, width: int = 1) -> dict[str, np.ndarray]:
    return {"X": np.zeros((count, width), np.float32)}


def test_requests_can_be_given_together(tmp_path: Path) -> None:
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % ("", ""))) as harness:
        answers = harness.execute([rows(2), Request(rows(3), request_id="second")])
        assert [answer["Y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[2, 5]]] * 2


@pytest.mark.parametrize(
    ("requests", "config", "why"),
    [
        ([rows(5), rows(4)], CONFIG % ("", ""), "have 9 rows together, but max_batch_size of model 'm' is 8"),
        ([rows(1), rows(1, 2)], CONFIG % ("", ""), "differ in their inputs"),
        ([], CONFIG % ("", ""), "got no request"),
        (rows(1), CONFIG % ("", ""), re.escape("expected a sequence of requests: execute([inputs])")),
        ([rows(1)] * 2, CONFIG.replace("dynamic_batching { %s }", "") % "", "gets one request at a time"),
    ],
)
def test_what_never_comes_together_is_refused(tmp_path: Path, requests: Any, config: str, why: str) -> None:
    with ModelHarness(folder_of(tmp_path, COUNTING, config)) as harness:
        with pytest.raises(CallerError, match=why):
            harness.execute(requests)
        with pytest.raises(InferenceError, match="batch-size must be <= 8"):
            harness.execute([rows(9)])


def test_requests_given_together_are_for_the_model_that_they_name(tmp_path: Path) -> None:
    folders = [
        folder_of(tmp_path, COUNTING, (CONFIG % ("", "")).replace("max_batch_size: 8", f"max_batch_size: {most}"), name)
        for name, most in (("few", 2), ("many", 8))
    ]
    with ModelHarness(*folders) as harness:
        answers = harness.execute([Request(rows(2), model="many"), Request(rows(3), model="many", version="1")])
        assert [answer["Y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[2, 5]]] * 2
        with pytest.raises(CallerError, match="got requests for models 'few' and 'many'"):
            harness.execute([rows(1), Request(rows(1), model="many")])
        with pytest.raises(InferenceError, match="version 7 is not found"):
            harness.execute([Request(rows(1), version="7")])


FOR_EVER = "max_queue_delay_microseconds: 60000000"  # nothing but a full batch ends the wait


@pytest.mark.parametrize(("preferred", "together"), [("", 8), ("preferred_batch_size: [ 4 ] ", 4)])
def test_requests_that_wait_at_once_come_together(tmp_path: Path, preferred: str, together: int) -> None:
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % (preferred + FOR_EVER, ""))) as harness:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: harness.infer(rows(1))["Y"].tolist(), range(8)))
        assert answers == [[[together] * 2]] * 8


def test_an_interrupt_leaves_no_request_of_its_batch_behind(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests): raise KeyboardInterrupt\n"
    with ModelHarness(folder_of(tmp_path, code, CONFIG % (FOR_EVER, "")), patience_s=10) as harness:
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(harness.infer, rows(4)) for _ in range(2)]
        interrupted, other = sorted(
            (call.exception() for call in calls), key=lambda error: type(error) is InferenceError
        )
        assert isinstance(interrupted, KeyboardInterrupt)
        assert isinstance(other, InferenceError)
        assert "execute of model 'm' was interrupted" in str(other)


def test_requests_that_come_to_a_busy_model_wait_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates: Any = ModuleType("gates")
    gates.begun, gates.may_end = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gates", gates)
    code = COUNTING.replace("rows = sum", "gates.begun.set(), gates.may_end.wait()\n            rows = sum")
    with ModelHarness(folder_of(tmp_path, f"    import gates\n{code}", CONFIG % ("", ""))) as harness:
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(harness.infer, rows(1))
            gates.begun.wait()
            others = [threads.submit(harness.infer, rows(1)) for _ in range(3)]
            batcher = harness._open().model("m").batcher
            wait_until(lambda: len(batcher._queue) == 3)
            gates.may_end.set()
        assert first.result()["Y"].tolist() == [[1, 1]]
        assert [other.result()["Y"].tolist() for other in others] == [[[3, 3]]] * 3


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


def test_a_client_that_closes_ends_its_calls_and_waits_for_none_that_is_late(
    harness: ModelHarness, folder: Path
) -> None:
    client = ShmClient(harness)
    with pytest.raises(DeadlineExceededError):
        client.infer("m", X, path="inline", timeout_s=0.2)
    (folder / "1" / "executed").unlink()
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(client.infer, "m", X, path="inline", timeout_s=60)
        wait_until((folder / "1" / "executed").exists)
        threads.submit(client.close).result(ENOUGH_S)
        assert isinstance(call.exception(ENOUGH_S), ClosedError)


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
                with client.infer("identity", INPUTS, path=path) as result:
                    assert result.path == path
                    np.testing.assert_array_equal(result["OUTPUT0"], INPUTS["INPUT0"])

    call_all_paths()  # modules are imported, and executors of the interpreter's made
    gc.collect()
    descriptors, threads = len(list(Path("/proc/self/fd").iterdir())), set(threading.enumerate())
    with ShmLeakProbe(pool_prefix=None):
        call_all_paths()
        gc.collect()
    # There may be fewer: those that close sockets stay for a second, after the first calls as well as the second.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    wait_until(lambda: threads.issuperset(threading.enumerate()))


def test_harnesses_leave_the_process_as_it_was() -> None:
    before = set(sys.modules), list(sys.path)
    with ModelHarness(IDENTITY) as outer:
        with ModelHarness(IDENTITY.with_name("text_upper")):
            pass
        assert outer.infer(INPUTS).keys() == {"OUTPUT0"}
    gone = {name for name in set(sys.modules) - before[0] if "model" in name and name.startswith("_")}
    assert gone == set()
    assert "triton_python_backend_utils" not in sys.modules or "triton_python_backend_utils" in before[0]
    assert sys.path == before[1]


def test_a_closed_harness_says_so() -> None:
    harness = ModelHarness(IDENTITY)
    assert repr(harness) == "<ModelHarness 'identity' open>"
    harness.close()
    harness.close()
    assert repr(harness) == "<ModelHarness 'identity' closed>"
    with pytest.raises(ClosedError):
        harness.infer(INPUTS)
    with pytest.raises(ClosedError):
        ShmClient(harness)


def test_a_harness_that_nobody_closed_is_told() -> None:
    with pytest.warns(ResourceWarning, match="the ModelHarness made"):
        _forget([ModelHarness(IDENTITY)])


def _forget(harnesses: list[ModelHarness]) -> None:
    server = harnesses[0]._open()
    harnesses.clear()
    gc.collect()
    server.close()


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
            wait_until(answer.running)
            threading.Event().wait(0.05)
        assert answer.result()["Y"].tolist() == INPUTS["INPUT0"].tolist()
