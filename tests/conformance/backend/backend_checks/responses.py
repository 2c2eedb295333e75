"""Responses and errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import refused, same, since


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


def check_a_response_with_an_error_has_it(pb_utils: Any, request: Any) -> None:
    error = pb_utils.TritonError("no")
    response = pb_utils.InferenceResponse(error=error)
    assert response.has_error() is True
    assert response.error() is error


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
