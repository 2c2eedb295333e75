"""Tensors of strings."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .expecting import named, refused, same


def check_strings_of_a_client_are_bytes_objects(pb_utils: Any, request: Any) -> None:
    words = named(request, "WORDS").as_numpy()
    same(words.dtype, np.dtype(object))
    same(words.tolist(), [b"a", "ü".encode(), b""])
    assert all(type(word) is bytes for word in words)
    assert words.flags.writeable


def check_dlpack_has_no_strings(pb_utils: Any, request: Any) -> None:
    text = "DLPack does not have support for string tensors."
    for tensor in (named(request, "WORDS"), pb_utils.Tensor("Y", np.array([b"a"], object))):
        refused(pb_utils.TritonModelException, text, tensor.to_dlpack)
        refused(pb_utils.TritonModelException, text, tensor.__dlpack__)
        same(tensor.__dlpack_device__(), (1, 0))


def check_a_tensor_of_strings_is_its_array(pb_utils: Any, request: Any) -> None:
    for array in (np.array([b"a", "b"], object), np.array([b"ab"]), np.array([], object), np.array(b"x", object)):
        tensor = pb_utils.Tensor("Y", array)
        assert tensor.as_numpy() is array
        same(tensor.shape(), list(array.shape))
    text = "NumPy dtype is not supported."
    refused(pb_utils.TritonModelException, text, lambda: pb_utils.Tensor("Y", np.array(["a"])))


def check_strings_are_packed_after_their_lengths_without_numpys_last_zeros(pb_utils: Any, request: Any) -> None:
    array = np.array([[b"ab", "ü"], [7, b""]], object)
    packed = b"\2\0\0\0ab\2\0\0\0\xc3\xbc\1\0\0\0007\0\0\0\0"
    same(pb_utils.serialize_byte_tensor(array), packed)
    same(pb_utils.serialize_byte_tensor(array.T.copy().T), packed)
    same(pb_utils.serialize_byte_tensor(np.array([b"a\0", b"bc"])), b"\1\0\0\0a\2\0\0\0bc")


def check_packed_strings_are_unpacked_unless_they_are_cut(pb_utils: Any, request: Any) -> None:
    found = pb_utils.deserialize_bytes_tensor(b"\2\0\0\0ab\0\0\0\0\1\0\0\0c")
    same(found.dtype, np.dtype(object))
    same(found.tolist(), [b"ab", b"", b"c"])
    same(pb_utils.deserialize_bytes_tensor(b"").shape, (0,))
    for cut in (b"\2\0\0\0a", b"\2\0\0"):
        refused(struct.error, None, pb_utils.deserialize_bytes_tensor, cut)


def check_strings_come_back_in_their_shape_and_as_they_were_at_first(pb_utils: Any, request: Any) -> None:
    for array in (np.array([[b"a", "ü", 7]], object), np.array([[b"ab\0", b"c"]]), np.zeros((2, 0), object)):
        found = _echoed(pb_utils, pb_utils.Tensor("WORDS", array))
        same(found.shape, array.shape)
        assert all(type(word) is bytes for word in found.ravel())
    array = np.array([[b"before"]], object)
    tensor = pb_utils.Tensor("WORDS", array)
    array[0, 0] = b"after"
    same(_echoed(pb_utils, tensor).tolist(), [[b"before"]])


def _echoed(pb_utils: Any, tensor: Any) -> Any:
    call = pb_utils.InferenceRequest(model_name="echo_words", inputs=[tensor], requested_output_names=["WORDS"])
    response = call.exec()
    assert not response.has_error(), response.error().message()
    return response.output_tensors()[0].as_numpy()
