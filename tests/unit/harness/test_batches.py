"""Which requests a harness has executed together."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.errors import CallerError
from shm_backend_utils.testing.harness import ModelHarness, Request
from tests.unit.fake_gpu import wait_until
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
    ("requests", "why"),
    [
        ([rows(5), rows(4)], "these requests have 9 rows together, but max_batch_size of model 'm' is 8"),
        ([rows(1), rows(1, 2)], "differ in the shapes of their inputs"),
        ([], "got no request"),
    ],
)
def test_what_never_comes_together_is_refused(tmp_path: Path, requests: list[dict[str, np.ndarray]], why: str) -> None:
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % ("", ""))) as harness:
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


def test_a_model_without_a_batcher_gets_one_request_at_a_time(tmp_path: Path) -> None:
    config = (CONFIG % ("", "")).replace("dynamic_batching {  }", "")
    with (
        ModelHarness(folder_of(tmp_path, COUNTING, config)) as harness,
        pytest.raises(CallerError, match="gets one request at a time"),
    ):
        harness.execute([rows(1), rows(1)])


def test_ragged_inputs_come_together(tmp_path: Path) -> None:
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % ("", "allow_ragged_batch: true"))) as harness:
        answers = harness.execute([rows(1, 3), rows(2, 5)])
        assert [answer["Y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[2, 3]]] * 2


def test_the_order_of_inputs_is_no_matter(tmp_path: Path) -> None:
    config = CONFIG % ("", "") + 'input [ { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] } ]'
    x, z = np.zeros((1, 3), np.float32), np.zeros((1, 5), np.float32)
    with ModelHarness(folder_of(tmp_path, COUNTING, config)) as harness:
        answers = harness.execute([{"X": x, "Z": z}, {"Z": z, "X": x}])
        assert [answer["Y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[2, 2]]] * 2


def test_requests_that_wait_at_once_come_together(tmp_path: Path) -> None:
    delay = "max_queue_delay_microseconds: 60000000"  # nothing but a full batch ends the wait
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % (delay, ""))) as harness:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: harness.infer(rows(2))["Y"].tolist(), range(4)))
        assert answers == [[[4, 8]]] * 4


def test_an_interrupt_leaves_no_request_of_its_batch_behind(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests): raise KeyboardInterrupt\n"
    delay = "max_queue_delay_microseconds: 60000000"
    with ModelHarness(folder_of(tmp_path, code, CONFIG % (delay, "")), patience_s=10) as harness:
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(harness.infer, rows(4)) for _ in range(2)]
        interrupted, other = sorted(
            (call.exception() for call in calls), key=lambda error: type(error) is InferenceError
        )
        assert isinstance(interrupted, KeyboardInterrupt)
        assert isinstance(other, InferenceError)
        assert "execute of model 'm' was interrupted" in str(other)


def test_a_preferred_size_is_not_exceeded(tmp_path: Path) -> None:
    preferred = "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000"
    with ModelHarness(folder_of(tmp_path, COUNTING, CONFIG % (preferred, ""))) as harness:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: harness.infer(rows(1))["Y"].tolist(), range(8)))
        assert answers == [[[4, 4]]] * 8


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
            batcher = harness._open().model("m")._batcher
            wait_until(lambda: len(batcher._queue) == 3)
            gates.may_end.set()
        assert first.result()["Y"].tolist() == [[1, 1]]
        assert [other.result()["Y"].tolist() for other in others] == [[[3, 3]]] * 3
