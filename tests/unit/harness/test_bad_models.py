"""Models and configurations that no server loads: what it says, and what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from shm_backend_utils.errors import CallerError, ModelError
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.harness.folders import BAD_CODE, TENSORS, folder_of

FINE = "class TritonPythonModel:\n    def execute(self, requests): return []\n"


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
@pytest.mark.parametrize("what", BAD_CODE)
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
        (
            'backend: "python"\nmax_batch_sise: 3',
            'config.pbtxt:2:1: Message type "inference.ModelConfig" has no field ',
        ),
        ('backend: "python"\nmax_batch_sise: 3', "Did you mean max_batch_size?"),
        (
            'backend: "python"\ninput [ { name: "X" data_type: TYPE_FLOAT dims: [ -1 ] } ]',
            "config.pbtxt:2:32: ",
        ),
        ('backend: "python"\ninput [ { name: "X" data_type: TYPE_FP dims: [ -1 ] } ]', "Did you mean TYPE_FP"),
        ('backend: "python"\ninput [\n', "config.pbtxt:"),
        (f'name: "other"\nbackend: "python"{TENSORS}', "unexpected directory name 'm' for model 'other'"),
        (f'backend: "python"\nmax_batch_size: -1{TENSORS}', "'max_batch_size' must be non-negative value for m"),
        (
            'backend: "python"\ninput [ { name: "X" data_type: TYPE_FP32 } ]',
            "model input 'X' must specify 'dims' for m",
        ),
        ('backend: "python"\ninput [ { name: "X" dims: [ 1 ] } ]', "model input 'X' must specify 'data_type' for m"),
        (
            f'backend: "python"\nmax_batch_size: 2\ndynamic_batching {{ preferred_batch_size: [ 4 ] }}{TENSORS}',
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            f'backend: "python"\ninstance_group [ {{ kind: KIND_GPU }} ]{TENSORS}',
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
        ),
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


def test_a_finalize_that_raises_is_told_and_all_others_are_called(tmp_path: Path) -> None:
    code = FINE + "    def finalize(self): raise ValueError('left open')\n"
    harness = ModelHarness(folder_of(tmp_path, code))
    with pytest.raises(ModelError, match="finalize of a model raised: ValueError: left open"):
        harness.close()
    harness.close()


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


@pytest.mark.parametrize("make", [ModelHarness, ModelHarness.in_child])
def test_a_model_that_did_not_initialize_is_not_finalized(tmp_path: Path, make: type[ModelHarness]) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args): raise ValueError('no weights')
            def finalize(self): self.weights.close()
    """
    with pytest.raises(ModelError, match="ValueError: no weights"):
        make(folder_of(tmp_path, code))
