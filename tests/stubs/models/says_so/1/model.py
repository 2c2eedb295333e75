"""What the docstrings of the stubs say of memory, types and errors. The parameter ``claim`` names what is to be shown.

A request fails with what is not so. It needs a NumPy that the stub process was built for, as all plain models do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from shm_backend_utils.tensors import dlpack

REFUSED_IN_INITIALIZE: list[str] = []


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except pb_utils.TritonModelException:
        return True
    return False


def of_wrong_type(call: Callable[[], object]) -> bool:
    try:
        call()
    except TypeError:
        return True
    return False


def tensor(request: pb_utils.InferenceRequest, name: str) -> pb_utils.Tensor:
    found = pb_utils.get_input_tensor_by_name(request, name)
    assert found is not None
    return found


def from_dlpack(name: str, array: npt.NDArray[np.float32]) -> pb_utils.Tensor:
    capsule: Any = dlpack.export(array)
    try:
        return pb_utils.Tensor.from_dlpack(name, capsule)
    finally:
        dlpack.mark_used(capsule)  # NumPy's own capsules do not know the name that the backend gives


class Claims:
    def arrived_array_is_one_copy(self, request: pb_utils.InferenceRequest) -> None:
        x = tensor(request, "X")
        assert x.as_numpy() is x.as_numpy()
        assert x.as_numpy().flags.writeable
        x.as_numpy()[0] = 77
        assert np.from_dlpack(x)[0] != 77

    def strings_arrive_as_bytes(self, request: pb_utils.InferenceRequest) -> None:
        words = tensor(request, "WORDS")
        assert words.as_numpy().dtype == np.object_
        assert words.as_numpy().tolist() == [b"a", b"bc"]
        assert refused(words.to_dlpack)

    def inputs_are_the_same_tensors_in_a_new_list(self, request: pb_utils.InferenceRequest) -> None:
        assert request.inputs() is not request.inputs()
        assert request.inputs()[0] is request.inputs()[0]
        assert pb_utils.get_input_tensor_by_name(request, "MISSING") is None
        assert tensor(request, "X").shape() is not tensor(request, "X").shape()

    def arrays_are_not_copied_into_tensors_but_at_the_end(self, request: pb_utils.InferenceRequest) -> None:
        array = np.zeros(3, np.float32)
        made = pb_utils.Tensor("Y", array)
        assert made.as_numpy() is array
        every_other = np.arange(6, dtype=np.float32)[::2]
        assert not np.shares_memory(pb_utils.Tensor("Y", every_other).as_numpy(), every_other)

    def arrays_of_other_types_are_refused(self, request: pb_utils.InferenceRequest) -> None:
        for dtype in ("complex64", "U3", ">f4"):
            array = np.zeros(2, dtype)
            assert refused(lambda array=array: pb_utils.Tensor("Y", array)), dtype  # type: ignore[misc]
        assert pb_utils.Tensor("Y", np.zeros(2, "S3")).as_numpy().dtype == "S3"
        assert of_wrong_type(lambda: pb_utils.Tensor("Y", [1.0]))  # type: ignore[arg-type]
        assert of_wrong_type(lambda: pb_utils.Tensor("Y", array=np.zeros(2)))  # type: ignore[call-arg]
        assert refused(lambda: pb_utils.Tensor("", np.zeros(2)))

    def no_tensor_tells_its_type(self, request: pb_utils.InferenceRequest) -> None:
        assert of_wrong_type(lambda: tensor(request, "X").triton_dtype())

    def dlpack_shares_memory_but_for_the_array(self, request: pb_utils.InferenceRequest) -> None:
        array = np.zeros(3, np.float32)
        made = from_dlpack("Y", array)
        array[0] = 7
        assert np.from_dlpack(made)[0] == 7
        assert made.as_numpy()[0] == 0
        assert made.__dlpack_device__() == (1, 0)

    def dlpack_looks_at_strides_of_two_dimensions(self, request: pb_utils.InferenceRequest) -> None:
        assert refused(lambda: from_dlpack("Y", np.zeros((4, 4), np.float32)[:, ::2]))
        assert from_dlpack("Y", np.arange(6, dtype=np.float32)[::2]).as_numpy().tolist() == [0, 1, 2]
        assert refused(lambda: pb_utils.Tensor.from_dlpack("Y", [1.0]))  # type: ignore[arg-type]
        assert of_wrong_type(lambda: tensor(request, "X").from_dlpack("Y", dlpack.export(np.zeros(2))))  # type: ignore[arg-type]

    def codes_equal_their_numbers(self, request: pb_utils.InferenceRequest) -> None:
        error = pb_utils.TritonError("m", pb_utils.TritonError.NOT_FOUND)
        assert error.code() == pb_utils.TritonError.NOT_FOUND == 2
        assert (error.code().name, error.code().value, int(error.code())) == ("NOT_FOUND", 2, 2)
        assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL
        assert of_wrong_type(lambda: pb_utils.TritonError("m", 2))  # type: ignore[arg-type]
        assert not isinstance(error, BaseException)

    def responses_hold_what_they_were_made_of(self, request: pb_utils.InferenceRequest) -> None:
        made, error = pb_utils.Tensor("Y", np.zeros(3, np.float32)), pb_utils.TritonError("m")
        response = pb_utils.InferenceResponse([made], error)
        assert response.output_tensors()[0] is made
        assert response.has_error()
        assert response.error() is error
        assert pb_utils.InferenceResponse().error() is None
        assert refused(lambda: pb_utils.InferenceResponse([None]))  # type: ignore[list-item]

    def what_nobody_gave_is_empty(self, request: pb_utils.InferenceRequest) -> None:
        assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("", 0, 0, 0)
        assert request.requested_output_names() == {"Y"}
        assert request.trace().get_context() is None
        assert not request.is_cancelled()
        assert list(json.loads(request.parameters())) == ["claim"]

    def requests_refuse_what_they_cannot_send(self, request: pb_utils.InferenceRequest) -> None:
        def make(**other: object) -> pb_utils.InferenceRequest:
            arguments = {"inputs": [tensor(request, "X")], "requested_output_names": ["Y"], "model_name": "none"}
            return pb_utils.InferenceRequest(**(arguments | other))  # type: ignore[call-overload, no-any-return]

        parameters: list[object] = [{"a": 1.5}, {1: "a"}, []]
        assert all(refused(lambda wrong=wrong: make(parameters=wrong)) for wrong in parameters)  # type: ignore[misc]
        assert refused(lambda: make(inputs=[None]))
        assert refused(lambda: make(requested_output_names=[""]))
        assert of_wrong_type(lambda: make(requested_output_names="Y"))
        assert of_wrong_type(lambda: make(timeout=-1))
        assert make(parameters={"a": 1, "b": "x", "c": True}).parameters() == '{"a": 1, "b": "x", "c": true}'
        assert make().parameters() == "{}"
        assert make(correlation_id="s").correlation_id() == "s"

    def models_that_are_not_there_are_an_error_of_the_response(self, request: pb_utils.InferenceRequest) -> None:
        call = pb_utils.InferenceRequest(inputs=request.inputs(), requested_output_names=["Y"], model_name="none")
        error = call.exec().error()
        assert error is not None
        assert error.code() == pb_utils.TritonError.INTERNAL
        assert [response.has_error() for response in call.exec(decoupled=True)] == [True]
        assert not pb_utils.is_model_ready("none")
        assert pb_utils.is_model_ready("says_so", "1")

    def iterators_begin_anew(self, request: pb_utils.InferenceRequest) -> None:
        call = pb_utils.InferenceRequest(inputs=request.inputs(), requested_output_names=["Y"], model_name="none")
        responses = call.exec(decoupled=True)
        assert list(responses) == list(responses)

    def calls_are_for_execute(self, request: pb_utils.InferenceRequest) -> None:
        assert REFUSED_IN_INITIALIZE == ["exec"]

    def senders_refuse_what_says_nothing(self, request: pb_utils.InferenceRequest) -> None:
        sender = request.get_response_sender()
        assert sender is request.get_response_sender()
        assert refused(lambda: sender.send())  # type: ignore[call-overload]  # noqa: PLW0108  # nothing is the point
        assert refused(lambda: sender.send(flags=5))
        assert refused(lambda: sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL))
        own = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="none")
        assert refused(lambda: own.get_response_sender().send(pb_utils.InferenceResponse()))

    def strings_are_serialized(self, request: pb_utils.InferenceRequest) -> None:
        words = np.array(["ä", b"b"], np.object_)
        assert pb_utils.serialize_byte_tensor(words) == b"\2\0\0\0\xc3\xa4\1\0\0\0b"
        assert pb_utils.serialize_byte_tensor(words[:0]) == ()
        assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None  # type: ignore[arg-type]
        assert pb_utils.deserialize_bytes_tensor(b"\1\0\0\0b").tolist() == [b"b"]

    def types_have_numbers(self, request: pb_utils.InferenceRequest) -> None:
        assert [pb_utils.triton_to_numpy_type(number) for number in (0, 1, 11, 13, 14)] == [
            *(None, np.bool_, np.float32, np.object_, None)
        ]
        assert pb_utils.numpy_to_triton_type(np.dtype(np.float32)) == pb_utils.numpy_to_triton_type(np.float32) == 11
        assert pb_utils.numpy_to_triton_type(np.complex64) is None
        assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
        assert "TYPE_BF16" not in pb_utils.TRITON_STRING_TO_NUMPY


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        call = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="says_so")
        if refused(call.exec):
            REFUSED_IN_INITIALIZE.append("exec")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        claim: Callable[[pb_utils.InferenceRequest], None] = getattr(
            Claims(), json.loads(request.parameters())["claim"]
        )
        claim(request)
        y = np.zeros(1, np.float32)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), pb_utils.Tensor("UNASKED", y)])
        y[0] = 1  # what is written before the response goes out counts
        return response
