"""Models in child processes: they die as stubs do, and nobody else with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.errors import ModelError
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.fake_gpu import wait_until
from tests.unit.harness.folders import TENSORS, folder_of

DYING = """
    import os
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            if x[0] == 7:
                os._exit(3)
            pb_utils.Logger.log_warn("executing")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([os.getpid()], np.float32))])]
"""
PARENT = """
import sys
import numpy as np
from shm_backend_utils.testing.harness import ModelHarness
ModelHarness.in_child(*sys.argv[1:]).infer({"X": np.zeros(1, np.float32)})
"""
X = {"X": np.zeros(1, np.float32)}
DEATH = {"X": np.full(1, 7, np.float32)}


def test_a_child_that_died_stays_dead(tmp_path: Path) -> None:
    with ModelHarness.in_child(folder_of(tmp_path, DYING), patience_s=30) as harness:
        assert harness.infer(X)["Y"][0] != os.getpid()
        assert ("WARNING", "executing") in harness.log
        for inputs in (DEATH, X, X):
            with pytest.raises(InferenceError, match="Stub process 'm_0' is not healthy.") as told:
                harness.infer(inputs)
            assert told.value.status() == "INTERNAL"
        with ShmClient(harness) as client:
            assert not client.is_model_ready("m")
            assert not client.is_server_ready()
            with pytest.raises(InferenceError, match="Stub process 'm_0' is not healthy."):
                client.infer("m", X)


def test_an_idle_child_is_killed(tmp_path: Path) -> None:
    with ModelHarness.in_child(folder_of(tmp_path, DYING)) as harness:
        os.kill(int(harness.infer(X)["Y"][0]), signal.SIGKILL)
        with pytest.raises(InferenceError, match="is not healthy"):
            harness.infer(X)


def test_a_model_that_is_loaded_anew_has_a_new_process(tmp_path: Path) -> None:
    with ModelHarness.in_child(folder_of(tmp_path, DYING)) as harness, ShmClient(harness) as client:
        with pytest.raises(InferenceError):
            harness.infer(DEATH)
        client.load_model("m")
        assert harness.infer(X)["Y"].shape == (1,)


def test_a_child_that_dies_while_it_loads_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Stub process 'm' is not healthy"):
        ModelHarness.in_child(folder_of(tmp_path, "import os\nos._exit(1)\n"))


def test_a_child_that_does_not_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)

    folder = folder_of(tmp_path, DYING)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ModelError, match="Stub process 'm' is not healthy"):
        ModelHarness.in_child(folder)
    (child,) = started
    assert child.returncode == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
def test_a_request_that_nobody_can_answer_any_more_is_told(tmp_path: Path, make: type[ModelHarness]) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests): return None\n"
    config = f'backend: "python"\n%s{TENSORS}'
    folders = [
        folder_of(tmp_path, code, config % policy, name)
        for name, policy in {"one": "", "many": "model_transaction_policy { decoupled: true }"}.items()
    ]
    with make(*folders, patience_s=30) as harness:
        with pytest.raises(InferenceError, match="model 'one' has let go of the request without an answer"):
            harness.infer(X)
        with pytest.raises(InferenceError, match="model 'many' has let go of the request without an answer"):
            list(harness.stream(X, model="many"))


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_waits_for_itself_is_told(tmp_path: Path, count: int) -> None:
    code = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                inner = pb_utils.InferenceRequest(
                    model_name="m", requested_output_names=["Y"], inputs=requests[0].inputs()
                )
                response = inner.exec()
                return [pb_utils.InferenceResponse([], response.error())]
    """
    config = f'backend: "python"\n{TENSORS}instance_group [ {{ count: {count} kind: KIND_CPU }} ]'
    with (
        ModelHarness(folder_of(tmp_path, code, config)) as harness,
        pytest.raises(InferenceError, match="calls itself"),
    ):
        harness.infer(X)


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
def test_a_finalize_that_raises_stops_no_unload_and_is_told_at_last(tmp_path: Path, make: type[ModelHarness]) -> None:
    asking = """
        import numpy as np
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                for act in (pb_utils.load_model, pb_utils.unload_model):
                    act("bad")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float32))])]
    """
    bad = "class TritonPythonModel:\n    def finalize(self): raise ValueError('still busy')\n"
    with (
        pytest.raises(ModelError, match="finalize of a model raised: ValueError: still busy"),
        make(folder_of(tmp_path, asking), folder_of(tmp_path, bad, name="bad"), patience_s=20) as harness,
    ):
        harness.infer(X)
    with (
        pytest.raises(ModelError, match="finalize of a model raised: ValueError: still busy"),
        make(folder_of(tmp_path, bad, name="worse")) as harness,
        ShmClient(harness) as client,
    ):
        client.unload_model("worse")


def test_a_child_that_waits_for_another_model_ends_with_its_parent(tmp_path: Path) -> None:
    calling = """
        import os
        import pathlib
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                pathlib.Path(__file__).with_name("pid").write_text(f"{os.getpid()} ")
                pb_utils.InferenceRequest(
                    model_name="keeping", requested_output_names=["Y"], inputs=requests[0].inputs()
                ).exec()
    """
    keeping = """
        class TritonPythonModel:
            def execute(self, requests):
                self.senders = [request.get_response_sender() for request in requests]
    """
    folders = [folder_of(tmp_path, calling), folder_of(tmp_path, keeping, name="keeping")]
    told = folders[0] / "1" / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, *map(str, folders)]) as parent:
        wait_until(lambda: told.exists() and told.read_text().endswith(" "))
        parent.kill()
    child = Path("/proc", told.read_text().strip(), "cmdline")
    wait_until(lambda: not child.exists() or not child.read_bytes())  # or it is not reaped
