"""Models that are wrong: what a server says, and what the harness warns of. In children, they die as stubs do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.errors import CallerError, ModelError
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.gpu.fakes import wait_until
from tests.unit.harness.folders import BAD_CODE, FINE, TENSORS, folder_of


@pytest.mark.parametrize(
    ("make", "what"), [*((ModelHarness, what) for what in BAD_CODE), (ModelHarness.in_child, "initialize")]
)
def test_code_that_does_not_load(tmp_path: Path, make: type[ModelHarness], what: str) -> None:
    code, said, advice = BAD_CODE[what]
    path, modules = list(sys.path), set(sys.modules)
    with pytest.raises(ModelError) as told:
        make(folder_of(tmp_path, code))
    text = str(told.value)
    assert text.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ")
    assert said in text
    assert advice in text
    assert sys.path == path
    assert not any(name.startswith("_m_") for name in set(sys.modules) - modules)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('backend: "python"\nmax_batch_sise: 3', 'pbtxt:2:1: Message type "inference.ModelConfig" has no field '),
        ('backend: "python"\ninput [ { name: "X" data_type: TYPE_FLOAT dims: [ -1 ] } ]', "config.pbtxt:2:32: "),
        ('backend: "python"\ninput [ { name: "X" data_type: TYPE_FLOAT32 dims: [ 1 ] } ]', "Did you mean TYPE_FP32?"),
        (f'backend: "python"\nmax_batch_size: -1{TENSORS}', "'max_batch_size' must be non-negative value for m"),
        (f'name: "other"\nbackend: "python"{TENSORS}', "unexpected directory name 'm' for model 'other'"),
        ('backend: "python"\ninput [ { name: "X" dims: [ 1 ] } ]', "model input 'X' must specify 'data_type' for m"),
        (f'backend: "python"\ninstance_group [ {{ kind: KIND_GPU }} ]{TENSORS}', "model m has kind KIND_GPU but"),
        (f'backend: "onnxruntime"{TENSORS}', "the harness runs models of the Python backend"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        ModelHarness(folder_of(tmp_path, FINE, config))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="needs a model's folder"):
        ModelHarness()
    with pytest.raises(ModelError, match="there is no model folder"):
        ModelHarness(tmp_path / "nothing")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "python"{TENSORS}')
    with pytest.raises(ModelError, match="at least one version must be available under the version policy"):
        ModelHarness(tmp_path / "m")
    (tmp_path / "m" / "1").mkdir()
    with pytest.raises(ModelError, match="Python model file not found in '.*/m/1/model.py'"):
        ModelHarness(tmp_path / "m")


def test_models_have_files_beside_them(tmp_path: Path) -> None:
    code = """
        from .beside import VALUE
        import other
        class TritonPythonModel:
            def initialize(self, args): assert (VALUE, other.VALUE) == (args["model_name"], args["model_name"])
    """
    folders = [folder_of(tmp_path, code, name=name) for name in ("a", "b")]
    for folder in folders:
        for file in ("beside.py", "other.py"):
            (folder / "1" / file).write_text(f"VALUE = {folder.name!r}\n")
    with ModelHarness(*folders):
        pass
    assert "other" not in sys.modules


CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([{}]) for request in requests]
"""
GOOD_Y = "pb_utils.Tensor('Y', np.zeros((1, 2), np.float32))"
GOOD_Z = "pb_utils.Tensor('Z', np.zeros((1, 7), np.float32))"
DOUBTFUL = {
    "pb_utils.Tensor('YY', np.zeros((1, 2), np.float32))": "model 'm' answered without output 'Y', and a server does "
    "not report that: return a pb_utils.Tensor",
    "pb_utils.Tensor('Y', np.zeros((1, 2)))": "output 'Y' of model 'm' is FP64 [1, 2], but config.pbtxt declares FP32 "
    "[-1, 2], and a server sends",
    "pb_utils.Tensor('Y', np.zeros((1, 3), np.float32))": "output 'Y' of model 'm' is FP32 [1, 3], but config.pbtxt "
    "declares FP32 [-1, 2]",
}
INPUTS = {"X": np.zeros((1, 2), np.float32)}


@pytest.mark.parametrize(("output", "said"), DOUBTFUL.items(), ids=["name", "type", "shape"])
def test_an_output_that_is_not_as_declared_is_warned_of(tmp_path: Path, output: str, said: str) -> None:
    with ModelHarness(folder_of(tmp_path, CODE.format(f"{output}, {GOOD_Z}"), CONFIG)) as harness:
        with pytest.warns(UserWarning, match=re.escape(said)) as told:
            harness.infer(INPUTS)
        assert [(warning.filename, len(told)) for warning in told] == [(__file__, 1)]
        with pytest.warns(UserWarning, match=re.escape(said)):
            harness.execute([INPUTS])


def test_what_is_as_declared_or_was_not_asked_for_is_not_warned_of(tmp_path: Path) -> None:
    with ModelHarness(folder_of(tmp_path / "all", CODE.format(f"{GOOD_Y}, {GOOD_Z}"), CONFIG)) as harness:
        assert sorted(harness.infer(INPUTS)) == ["Y", "Z"]
    with ModelHarness(folder_of(tmp_path / "one", CODE.format(GOOD_Y), CONFIG)) as harness:
        assert sorted(harness.infer(INPUTS, outputs=["Y"])) == ["Y"]
    error = CODE.replace("([{}])", "([], pb_utils.TritonError('no'))")
    with ModelHarness(folder_of(tmp_path / "none", error, CONFIG)) as harness:
        assert "no" in str(harness.execute([INPUTS])[0])


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


def test_a_child_that_died_stays_dead_until_it_is_loaded_anew(tmp_path: Path) -> None:
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
            client.load_model("m")
        assert harness.infer(X)["Y"].shape == (1,)


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
        with pytest.raises(InferenceError, match="model 'one' has dropped the request without an answer"):
            harness.infer(X)
        with pytest.raises(InferenceError, match="model 'many' has dropped the request without an answer"):
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
