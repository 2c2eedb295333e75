"""PyTorch as DLPack's other side: what it takes of views, and what is taken of its tensors. Nothing is copied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.tensors import dlpack
from shm_backend_utils.tensors.view import TensorView

STRIDED: list[Callable[[Any], Any]] = [
    lambda tensor: tensor.T,
    lambda tensor: tensor[::2, ::3],
    lambda tensor: tensor[:, 1],
    lambda tensor: tensor[:1].expand(4, 6),
    lambda tensor: tensor[1:2, 1:2],
]


def torch() -> Any:
    """Return PyTorch, which makes all later tests of its process slower."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup installs its build for CPUs")


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


@pytest.mark.parametrize(
    ("kind", "name"), [("bool", "BOOL"), ("int8", "INT8"), ("float64", "FP64"), ("bfloat16", "BF16")]
)
def test_a_tensor_of_pytorch_is_consumed_whatever_its_strides(kind: str, name: str) -> None:
    for strided in STRIDED:
        tensor = strided((torch().arange(24).reshape(4, 6) % 2).to(getattr(torch(), kind)))
        array = dlpack.consume(tensor.__dlpack__())
        expected = (dtypes.BY_NAME[name].numpy, tuple(tensor.shape), tensor.data_ptr())
        assert (array.dtype, array.shape, array.ctypes.data) == expected
        assert array.tolist() == tensor.tolist()
