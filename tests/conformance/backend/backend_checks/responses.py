"""Responses and errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import refused, same, since

CODES = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"]


def check_a_response_has_its_tensors(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor("Y", np.zeros(1))
    response = pb_utils.InferenceResponse((tensor,))
    assert response.output_tensors()[0] is tensor
    response.output_tensors().clear()
    same(len(response.output_tensors()), 1)
    assert response.has_error() is False
    assert response.error() is None


def check_a_response_may_be_empty(pb_utils: Any, request: Any) -> None:
    same(pb_utils.InferenceResponse().output_tensors(), [])
    same(pb_utils.InferenceResponse(output_tensors=[], error=None).has_error(), False)


def check_a_missing_output_is_refused(pb_utils: Any, request: Any) -> None:
    text = "Output tensor for inference response should not be empty."
    refused(pb_utils.TritonModelException, text, lambda: pb_utils.InferenceResponse([None]))


def check_outputs_come_in_a_sequence(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor("Y", np.zeros(1))
    for outputs in (tensor, [1], {tensor}, None, iter([tensor]), "Y", {"Y": tensor}):
        refused(TypeError, None, pb_utils.InferenceResponse, outputs)


def check_a_response_with_an_error_has_it(pb_utils: Any, request: Any) -> None:
    error = pb_utils.TritonError("no")
    response = pb_utils.InferenceResponse(error=error)
    assert response.has_error() is True
    assert response.error() is error


def check_the_error_of_a_response_is_a_triton_error(pb_utils: Any, request: Any) -> None:
    for error in ("no", ValueError("no"), 1):
        refused(TypeError, None, pb_utils.InferenceResponse, [], error)


@since("2.55")
def check_a_response_has_parameters(pb_utils: Any, request: Any) -> None:
    same(pb_utils.InferenceResponse().parameters(), "{}")
    same(pb_utils.InferenceResponse(parameters={"a": 1}).parameters(), '{"a": 1}')
    text = "Expect parameters values to have type bool/int/str, found type <class 'float'>"
    refused(pb_utils.TritonModelException, text, lambda: pb_utils.InferenceResponse(parameters={"a": 1.5}))


def check_an_error_has_its_message_and_code(pb_utils: Any, request: Any) -> None:
    error = pb_utils.TritonError("nö", pb_utils.TritonError.NOT_FOUND)
    same(error.message(), "nö")
    assert error.code() == pb_utils.TritonError.NOT_FOUND
    error = pb_utils.TritonError(message="m", code=pb_utils.TritonError.CANCELLED)
    assert error.code() == pb_utils.TritonError.CANCELLED


def check_an_error_is_internal_by_default(pb_utils: Any, request: Any) -> None:
    assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL


def check_all_codes_are_there(pb_utils: Any, request: Any) -> None:
    errors = pb_utils.TritonError
    for number, name in enumerate(CODES):
        code = getattr(errors, name)
        same((int(code), code.value, code.name), (number, number, name))
        same(str(code), f"__ErrorCode.{name}")
        same(repr(code), f"<__ErrorCode.{name}: {number}>")
        assert code == number
        same(hash(code), number)
    same(list(type(errors.INTERNAL).__members__), CODES)


def check_codes_have_no_order_and_are_no_numbers(pb_utils: Any, request: Any) -> None:
    errors = pb_utils.TritonError
    assert not isinstance(errors.INTERNAL, int)
    refused(TypeError, None, lambda: errors.INTERNAL < errors.UNKNOWN)
    assert errors.INTERNAL != None  # noqa: E711  # the comparison itself is what is looked at
    assert errors.INTERNAL != "INTERNAL"
    assert errors.INTERNAL != errors.UNKNOWN


def check_a_code_is_one_of_tritons(pb_utils: Any, request: Any) -> None:
    for code in (1, None, "INTERNAL"):
        refused(TypeError, None, pb_utils.TritonError, "m", code)


def check_a_message_is_a_text(pb_utils: Any, request: Any) -> None:
    refused(TypeError, None, pb_utils.TritonError)
    for message in (None, 7, ValueError("m")):
        refused(TypeError, None, pb_utils.TritonError, message)


def check_a_triton_error_is_no_exception(pb_utils: Any, request: Any) -> None:
    assert not isinstance(pb_utils.TritonError("m"), BaseException)


def check_a_model_exception_is_one(pb_utils: Any, request: Any) -> None:
    kind = pb_utils.TritonModelException
    same(kind.__mro__[1:], (Exception, BaseException, object))
    same(str(kind("m")), "m")


def check_what_responses_and_errors_can_be_asked(pb_utils: Any, request: Any) -> None:
    same([name for name in dir(pb_utils.Tensor) if name[0] != "_"],
         ["as_numpy", "from_dlpack", "is_cpu", "name", "shape", "to_dlpack", "triton_dtype"])  # fmt: skip
    same(
        [name for name in dir(pb_utils.TritonError) if name[:2] != "__" and name.strip("_") == name],
        sorted([*CODES, "code", "message"]),
    )
