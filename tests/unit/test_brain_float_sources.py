"""What users may pass as an input of BF16, for which NumPy has no type of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.sources import sources
from shm_backend_utils.errors import TensorTypeError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.tensors import dlpack

ARRAY = np.array([1, -2, 0.5], dtypes.BF16.numpy)


def written(value: Any) -> npt.NDArray[Any]:
    """Return what the model gets of a value that is passed for an input of BF16."""
    tensor = {"name": "X", "data_type": "TYPE_BF16", "dims": [-1]}
    source = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]
    target: npt.NDArray[Any] = np.empty(source.shape, source.dtype.numpy)
    source.write_to(target)
    return target


class Producer:
    """An array of another library: all that one can do is take it over by DLPack."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def __dlpack__(self, **wanted: Any) -> Any:
        return dlpack.export(self._array)


@pytest.mark.parametrize(
    "kind",
    [
        np.asarray,
        Producer,
        lambda array: [array],
        lambda array: [Producer(array)],
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: array[::-1].copy()[::-1],
    ],
    ids=["array", "DLPack", "list of arrays", "list of DLPack", "big-endian", "reversed"],
)
def test_every_kind_of_array_arrives(kind: Any) -> None:
    found = written(kind(ARRAY))
    assert (found.dtype, found.tolist()) == (ARRAY.dtype, ARRAY.tolist())


@pytest.mark.parametrize("value", [[1, 256, -3], [0.5, 0.1], [2**127], [-(2**63), 1], [float("inf"), 0.0]], ids=str)
def test_pythons_numbers_become_the_nearest_ones(value: list[Any]) -> None:
    found = written(value)
    assert found.dtype == ARRAY.dtype
    assert found.tolist() == pytest.approx(value, rel=2**-8)


@pytest.mark.parametrize("value", [[257], [1e39], [2**128], [True], [1j], [np.int64(2**53 + 1)]], ids=str)
def test_pythons_numbers_that_do_not_fit_are_refused(value: list[Any]) -> None:
    with pytest.raises(
        TensorTypeError, match="'X' holds .*, which is no value of TYPE_BF16; pass numbers that are, or an array"
    ):
        written(value)


WITHOUT_ML_DTYPES = """
import sys, types
sys.modules["ml_dtypes"] = types.ModuleType("ml_dtypes")  # tritonclient wants one, but this one has no types
import numpy as np
from shm_backend_utils.client.inputs.sources import sources
from shm_backend_utils.errors import TensorTypeError
from shm_backend_utils.model_spec import ModelSpec

spec = ModelSpec.from_config({"name": "model", "input": [{"name": "X", "data_type": "TYPE_BF16", "dims": [-1]}]})
bits = np.array([0x3F80, 0x4000], np.uint16).view("V2")
source = sources(spec, {"X": bits})["X"]
written = np.empty(source.shape, source.dtype.numpy)
source.write_to(written)
print(source.dtype.numpy == bits.dtype, written.tobytes() == bits.tobytes())
try:
    sources(spec, {"X": [1.5]})
except TensorTypeError as error:
    print(error)
"""


def test_without_ml_dtypes_two_bytes_each_are_taken_and_numbers_refused() -> None:
    program = [sys.executable, "-c", WITHOUT_ML_DTYPES]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "True True"
    assert said[1].startswith("input 'X' holds 1.5, which is no value of TYPE_BF16; ")
