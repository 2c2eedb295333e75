"""PyTorch as DLPack's other side: what it takes of views, and what is taken of its tensors. Nothing is copied."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.sources import sources
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import TensorError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.tensors import dlpack
from shm_backend_utils.tensors.view import TensorView

STRIDED = {
    "transposed": lambda tensor: tensor.T,
    "every other": lambda tensor: tensor[::2, ::3],
    "a column": lambda tensor: tensor[:, 1],
    "a part": lambda tensor: tensor[1:3, 2:4],
    "expanded": lambda tensor: tensor[:1].expand(4, 6),
    "a column of one": lambda tensor: tensor[1:2, 1:2],
}


def torch() -> Any:
    """Return PyTorch, which makes all later tests of its process slower."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup installs its build for CPUs")


def torch_type(dtype: DType) -> Any:
    other = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16"}
    return getattr(torch(), other.get(dtype.name, dtype.name.lower()))


def tensor_of(dtype: DType) -> Any:
    return (torch().arange(24).reshape(4, 6) % 2).to(torch_type(dtype))


def test_what_pytorch_writes_is_in_the_view_which_it_outlives() -> None:
    array = np.zeros((4, 6), dtypes.BF16.numpy)
    alive = weakref.ref(array)
    tensor = torch().from_dlpack(TensorView("IMAGE", array.view(), dtypes.BF16, "direct"))
    tensor.fill_(3)
    assert (array == 3).all()
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    assert alive() is None


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("dtype", [dtypes.BY_NAME[name] for name in ("BOOL", "INT8", "FP64", "BF16")])
def test_a_tensor_of_pytorch_is_consumed_and_an_input_whatever_its_strides(dtype: DType, strided: Any) -> None:
    tensor = strided(tensor_of(dtype))
    array = dlpack.consume(tensor.__dlpack__())
    assert (array.dtype, array.shape, array.ctypes.data) == (dtype.numpy, tuple(tensor.shape), tensor.data_ptr())
    assert array.tolist() == tensor.tolist()
    found = written(dtype, tensor, tensor.ndim)
    assert (found.dtype, found.tolist()) == (dtype.numpy, tensor.tolist())


def written(dtype: DType, value: Any, rank: int) -> npt.NDArray[Any]:
    """Return what the model gets of a value that is passed for an input."""
    tensor = {"name": "X", "data_type": f"TYPE_{dtype.name}", "dims": [-1] * rank}
    source = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]
    target: npt.NDArray[Any] = np.empty(source.shape, source.dtype.numpy)
    source.write_to(target)
    return target


@pytest.mark.parametrize("name", ["FP32", "BF16"])
def test_a_tensor_that_pytorch_does_not_give_away_is_an_error_that_names_the_input(name: str) -> None:
    dtype = dtypes.BY_NAME[name]
    with pytest.raises(TensorError, match="'X'"):
        written(dtype, tensor_of(dtype).requires_grad_(), 2)
