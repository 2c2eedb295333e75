"""Outputs that are not as the model declares them: the server sends them without a word, the harness warns."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.errors import CallerError
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.harness.folders import folder_of

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
    "of another name": (
        f"pb_utils.Tensor('YY', np.zeros((1, 2), np.float32)), {GOOD_Z}",
        "model 'm' answered without output 'Y', and a server says nothing of it: give a pb_utils.Tensor of that name",
    ),
    "missing": (GOOD_Y, "model 'm' answered without output 'Z', and a server says nothing of it"),
    "of another type": (
        f"pb_utils.Tensor('Y', np.zeros((1, 2))), {GOOD_Z}",
        "output 'Y' of model 'm' is FP64 [1, 2], but config.pbtxt declares FP32 [-1, 2], and a server sends it so",
    ),
    "of another shape": (
        f"pb_utils.Tensor('Y', np.zeros((1, 3), np.float32)), {GOOD_Z}",
        "output 'Y' of model 'm' is FP32 [1, 3], but config.pbtxt declares FP32 [-1, 2]",
    ),
    "without a batch": (
        f"pb_utils.Tensor('Y', np.zeros(2, np.float32)), {GOOD_Z}",
        "output 'Y' of model 'm' is FP32 [2], but config.pbtxt declares FP32 [-1, 2]",
    ),
}
INPUTS = {"X": np.zeros((1, 2), np.float32)}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_an_output_that_is_not_as_declared_is_warned_of(tmp_path: Path, what: str) -> None:
    outputs, said = DOUBTFUL[what]
    with ModelHarness(folder_of(tmp_path, CODE.format(outputs), CONFIG)) as harness:
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


def test_one_mapping_is_no_sequence_of_requests(tmp_path: Path) -> None:
    said = re.escape("expected a sequence of requests: execute([inputs])")
    with (
        ModelHarness(folder_of(tmp_path, CODE.format(GOOD_Y), CONFIG)) as harness,
        pytest.raises(CallerError, match=said),
    ):
        harness.execute(INPUTS)  # type: ignore[arg-type]
