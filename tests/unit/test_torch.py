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

NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
DTYPES_AND_SHAPES = [
    *((dtype, (2, 3, 4)) for dtype in NUMBERS),
    *(
        (dtype, shape)
        for dtype in (dtypes.BY_NAME["FP32"], dtypes.BF16)
        for shape in [(), (1,), (0,), (3, 0, 2), (1, 3, 1)]
    ),
]
every_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
some_dtypes = pytest.mark.parametrize("dtype", [dtypes.BY_NAME[name] for name in ("BOOL", "INT8", "FP64", "BF16")])
every_dtype_and_shape = pytest.mark.parametrize(
    ("dtype", "shape"), DTYPES_AND_SHAPES, ids=[f"{dtype.name} {shape}" for dtype, shape in DTYPES_AND_SHAPES]
)

STRIDED = {
    "transposed": lambda tensor: tensor.T,
    "every other": lambda tensor: tensor[::2, ::3],
    "a column": lambda tensor: tensor[:, 1],
    "a part": lambda tensor: tensor[1:3, 2:4],
    "expanded": lambda tensor: tensor[:1].expand(4, 6),
    "a column of one": lambda tensor: tensor[1:2, 1:2],
}
every_stride = pytest.mark.parametrize("strided", STRIDED.values(), ids=list(STRIDED))


def torch() -> Any:
    """Return PyTorch, which makes all later tests of its process slower."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup installs its build for CPUs")


def torch_type(dtype: DType) -> Any:
    """Return PyTorch's name for a data type."""
    other = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16"}
    return getattr(torch(), other.get(dtype.name, dtype.name.lower()))


def array_of(dtype: DType, shape: tuple[int, ...] = (4, 6)) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.empty(shape, dtype.numpy)
    array[...] = np.arange(array.size).reshape(shape) % 2
    return array


def tensor_of(dtype: DType, shape: tuple[int, ...] = (4, 6)) -> Any:
    return (torch().arange(int(np.prod(shape))).reshape(shape) % 2).to(torch_type(dtype))


def view_of(array: npt.NDArray[Any], *, writable: bool = True) -> TensorView:
    memory = array.view()
    memory.flags.writeable = writable
    return TensorView("IMAGE", memory, dtypes.from_numpy(array.dtype, "IMAGE"), "direct")


def assert_is(tensor: Any, array: npt.NDArray[Any], dtype: DType) -> None:
    """Compare a tensor of PyTorch and an array that are to be the same memory."""
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_type(dtype), array.shape)
    assert array.dtype == dtype.numpy
    assert tensor.tolist() == array.tolist()
    assert tensor.data_ptr() == array.ctypes.data or not array.size


@every_dtype_and_shape
def test_pytorch_takes_a_view_and_what_is_made_of_it(dtype: DType, shape: tuple[int, ...]) -> None:
    array = array_of(dtype, shape)
    for given in (view_of(array), view_of(array).__dlpack__(), view_of(array, writable=False)):
        assert_is(torch().from_dlpack(given), array, dtype)


@pytest.mark.parametrize("strided", [lambda array: array.T, lambda array: array[::2, ::3], lambda array: array[:, 1]])
@some_dtypes
def test_pytorch_takes_an_array_of_any_strides(dtype: DType, strided: Any) -> None:
    array = strided(array_of(dtype))
    taken = torch().from_dlpack(dlpack.export(array))
    assert_is(taken, array, dtype)
    assert [stride * dtype.itemsize for stride in taken.stride()] == list(array.strides)


def test_what_pytorch_writes_is_in_the_view_which_it_outlives() -> None:
    array = array_of(dtypes.BF16)
    alive = weakref.ref(array)
    tensor = torch().from_dlpack(view_of(array))
    tensor.fill_(3)
    assert (array == 3).all()
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    assert alive() is None


@every_dtype_and_shape
def test_a_tensor_of_pytorch_is_consumed(dtype: DType, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    assert_is(tensor, dlpack.consume(tensor.__dlpack__()), dtype)


@every_stride
@some_dtypes
def test_a_tensor_of_pytorch_is_consumed_and_an_input_whatever_its_strides(dtype: DType, strided: Any) -> None:
    tensor = strided(tensor_of(dtype))
    assert_is(tensor, dlpack.consume(tensor.__dlpack__()), dtype)
    found = written(dtype, tensor, tensor.ndim)
    assert (found.dtype, found.tolist()) == (dtype.numpy, tensor.tolist())


def test_what_is_written_to_a_consumed_tensor_is_in_it_and_stays_when_pytorchs_has_gone() -> None:
    tensor = tensor_of(dtypes.BF16)
    array = dlpack.consume(tensor.__dlpack__())
    array[...] = 3
    assert (tensor == 3).all()
    del tensor
    gc.collect()
    assert (array == 3).all()


def written(dtype: DType, value: Any, rank: int) -> npt.NDArray[Any]:
    """Return what the model gets of a value that is passed for an input."""
    tensor = {"name": "X", "data_type": f"TYPE_{dtype.name}", "dims": [-1] * rank}
    source = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]
    target: npt.NDArray[Any] = np.empty(source.shape, source.dtype.numpy)
    source.write_to(target)
    return target


@every_dtype
def test_tensors_of_pytorch_can_be_the_rows_of_an_input(dtype: DType) -> None:
    tensor = tensor_of(dtype)
    assert written(dtype, list(tensor), 2).tolist() == tensor.tolist()


@pytest.mark.parametrize("name", ["FP32", "BF16"])
def test_a_tensor_that_pytorch_does_not_give_away_is_an_error_that_names_the_input(name: str) -> None:
    dtype = dtypes.BY_NAME[name]
    with pytest.raises(TensorError, match="'X'"):
        written(dtype, tensor_of(dtype).requires_grad_(), 2)
