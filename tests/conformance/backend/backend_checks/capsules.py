"""DLPack, in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import NUMBERS, named, refused, same
from .handmade import Speaker, capsule

NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
)
NO_TENSOR = (
    "Provided tensor is not supported. Tensor must be a DLPack capsule         "
    "or have `__dlpack__` and `__dlpack_device__` attributes"
)


def check_a_capsule_is_taken_over_and_its_offset_respected(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor.from_dlpack("Y", capsule((2, 2)))
    same((tensor.name(), tensor.shape(), tensor.as_numpy().dtype), ("Y", [2, 2], np.dtype(np.float32)))
    same(tensor.as_numpy().tobytes(), bytes(range(16)))
    tensor = pb_utils.Tensor.from_dlpack("Y", capsule((4,), code=1, bits=8, byte_offset=5))
    same(tensor.as_numpy().tolist(), [5, 6, 7, 8])


def check_bf16_travels_by_dlpack_alone(pb_utils: Any, request: Any) -> None:
    text = "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    half = named(request, "HALF")
    refused(pb_utils.TritonModelException, text, half.as_numpy)
    again = pb_utils.Tensor.from_dlpack("Y", half)
    same(again.shape(), [2])
    refused(pb_utils.TritonModelException, text, again.as_numpy)


def check_a_tensor_of_a_capsule_has_an_array_of_its_own(pb_utils: Any, request: Any) -> None:
    source = np.arange(3, dtype=np.float32)
    tensor = pb_utils.Tensor.from_dlpack("Y", pb_utils.Tensor("S", source))
    source[:] = 7
    same(tensor.as_numpy().tolist(), [0.0, 1.0, 2.0])
    same(np.from_dlpack(tensor).tolist(), [7.0, 7.0, 7.0])
    assert tensor.as_numpy() is tensor.as_numpy()
    assert tensor.as_numpy().flags.writeable


def check_every_type_comes_and_goes_by_dlpack(pb_utils: Any, request: Any) -> None:
    codes = {"int": 0, "uint": 1, "float": 2, "bool": 6}
    for name in ["bool", *NUMBERS]:
        dtype = np.dtype(name)
        code = codes[name.rstrip("0123456789")]
        tensor = pb_utils.Tensor.from_dlpack("Y", capsule((2,), code=code, bits=8 * dtype.itemsize, content=bytes(16)))
        same(tensor.as_numpy().dtype, dtype)
    for name in NUMBERS:
        array = np.arange(3).astype(name)
        found = np.from_dlpack(pb_utils.Tensor("Y", array))
        same((found.dtype, found.tolist()), (array.dtype, array.tolist()))


def check_types_that_triton_has_not_are_refused(pb_utils: Any, request: Any) -> None:
    for code, bits, lanes in ((5, 64, 1), (2, 32, 2), (2, 8, 1), (0, 4, 1)):
        made = capsule((1,), code=code, bits=bits, lanes=lanes)
        refused(pb_utils.TritonModelException, "Dtype is invalid.", pb_utils.Tensor.from_dlpack, "Y", made)


def check_strides_must_be_those_of_c_order_but_for_ones(pb_utils: Any, request: Any) -> None:
    for shape, strides in (((2, 3), (1, 2)), ((2, 3), (3, 2)), ((2, 2, 2), (4, 1, 2)), ((1, 2), (1, 2))):
        made = capsule(shape, strides)
        refused(pb_utils.TritonModelException, NOT_CONTIGUOUS, pb_utils.Tensor.from_dlpack, "Y", made)
    for shape, strides in (((2, 1, 3), (3, 99, 1)), ((2, 3), (3, 1)), ((3, 1), (1, 7))):
        same(pb_utils.Tensor.from_dlpack("Y", capsule(shape, strides)).shape(), list(shape))


def check_other_devices_are_refused(pb_utils: Any, request: Any) -> None:
    for device in (4, 7, 10, 13):
        text = f"DLDevice type {device} is not support by Python backend."
        made = capsule((1,), device=device)
        refused(pb_utils.TritonModelException, text, pb_utils.Tensor.from_dlpack, "Y", made)
        speaker = Speaker(None, (device, 0))
        refused(pb_utils.TritonModelException, text, pb_utils.Tensor.from_dlpack, "Y", speaker)
        same(speaker.asked, [])


def check_pinned_memory_is_the_hosts(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor.from_dlpack("Y", capsule((2,), device=3, code=1, bits=8))
    assert tensor.is_cpu() is True
    same(tensor.as_numpy().tolist(), [0, 1])
    same(tensor.__dlpack_device__(), (1, 0))


def check_another_library_is_asked_for_no_stream_and_its_errors_are_its_own(pb_utils: Any, request: Any) -> None:
    class Broken(Speaker):
        def __dlpack__(self, stream: Any = None) -> Any:
            raise BufferError("not today")

    speaker = Speaker(capsule((2,)))
    same((pb_utils.Tensor.from_dlpack("Y", speaker).shape(), speaker.asked), ([2], [None]))
    refused(BufferError, "not today", lambda: pb_utils.Tensor.from_dlpack("Y", Broken(None)))
    for thing in (5, None, "x", [1.0]):
        refused(pb_utils.TritonModelException, NO_TENSOR, pb_utils.Tensor.from_dlpack, "Y", thing)
