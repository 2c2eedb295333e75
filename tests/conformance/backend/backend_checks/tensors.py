"""Tensors that a model makes of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import NUMBERS, refused, same

NOT_SUPPORTED = "NumPy dtype is not supported."


def check_a_tensor_of_an_array_is_that_array_with_a_name(pb_utils: Any, request: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pb_utils.Tensor("Y", array)
    assert tensor.as_numpy() is array
    assert tensor.as_numpy() is tensor.as_numpy()
    assert tensor.is_cpu() is True
    same((tensor.name(), tensor.shape()), ("Y", [2, 3]))
    for shape in ([2, 0, 3], []):
        same(pb_utils.Tensor("Y", np.zeros(shape, np.int8)).shape(), shape)


def check_every_type_of_triton_has_an_array_and_nothing_else_is_content(pb_utils: Any, request: Any) -> None:
    for name in ["bool", *NUMBERS, "object"]:
        same(pb_utils.Tensor("Y", np.zeros(2, name)).as_numpy().dtype, np.dtype(name))
    for name in ("complex64", ">f4", ">i8", "U3", "datetime64[s]", "V2", "longdouble"):
        refused(pb_utils.TritonModelException, NOT_SUPPORTED, pb_utils.Tensor, "Y", np.zeros(2, name))
    for content in ([1], np.float32(1), None, b"1", memoryview(b"1")):
        refused(TypeError, None, pb_utils.Tensor, "Y", content)
    refused(pb_utils.TritonModelException, "Tensor name cannot be an empty string.", pb_utils.Tensor, "", np.zeros(1))


def check_an_array_that_is_not_contiguous_is_copied(pb_utils: Any, request: Any) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    found = pb_utils.Tensor("Y", array).as_numpy()
    assert found is not array
    assert found.flags.c_contiguous
    same(found.tolist(), array.tolist())
    array[0, 0] = 99
    same(int(found[0, 0]), 0)


def check_a_read_only_array_stays_read_only(pb_utils: Any, request: Any) -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    tensor = pb_utils.Tensor("Y", array)
    assert tensor.as_numpy() is array
    refused(ValueError, None, lambda: tensor.as_numpy().fill(1))


def check_what_dlpack_sees_is_the_array_and_can_outlive_the_tensor(pb_utils: Any, request: Any) -> None:
    array = np.zeros(3, np.float32)
    seen = np.from_dlpack(pb_utils.Tensor("Y", array))
    array[:] = 7
    same(seen.tolist(), [7.0, 7.0, 7.0])
    same(int(np.from_dlpack(pb_utils.Tensor("Y", np.arange(1000))).sum()), 499500)
