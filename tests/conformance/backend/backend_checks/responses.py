"""Responses, errors, and senders of models that are decoupled and of one that is not."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import refused, same, since

SEND = "Unable to send response."
CLOSED = f"{SEND} Response sender has been closed."


def check_a_response_has_its_tensors_or_an_error(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor("Y", np.zeros(1))
    response = pb_utils.InferenceResponse((tensor,))
    assert response.output_tensors()[0] is tensor
    response.output_tensors().clear()
    same(len(response.output_tensors()), 1)
    same((response.has_error(), response.error()), (False, None))
    same(pb_utils.InferenceResponse().output_tensors(), [])
    same(pb_utils.InferenceResponse(output_tensors=[], error=None).has_error(), False)
    error = pb_utils.TritonError("no")
    response = pb_utils.InferenceResponse(error=error)
    assert response.has_error() is True
    assert response.error() is error
    text = "Output tensor for inference response should not be empty."
    refused(pb_utils.TritonModelException, text, lambda: pb_utils.InferenceResponse([None]))


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
    assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL


def check_flags_are_0_or_final_and_the_last_flag_is_not_alone(pb_utils: Any, request: Any) -> None:
    error, sender = pb_utils.TritonModelException, request.get_response_sender()
    for flags in (2, 3, 2**32 - 1):
        refused(error, f"{SEND} Unsupported flag provided.", sender.send, pb_utils.InferenceResponse(), flags)
    text = "Inference Response object must be provided when the response flags is set to zero."
    refused(error, text, sender.send)
    refused(error, text, sender.send, None, 0)
    text = f"{SEND} Non-decoupled model cannot send complete final before sending a response."
    refused(error, text, lambda: sender.send(flags=1))


def decoupled_check_after_the_last_response_nothing_is_sent(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    assert sender.send(pb_utils.InferenceResponse()) is None
    assert sender.send(flags=final) is None
    refused(pb_utils.TritonModelException, CLOSED, lambda: sender.send(flags=final))
    refused(pb_utils.TritonModelException, CLOSED, lambda: sender.send(pb_utils.InferenceResponse()))
    refused(pb_utils.TritonModelException, CLOSED, lambda: sender.send(pb_utils.InferenceResponse(), final))


def decoupled_check_a_stream_may_end_without_a_response(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    sender.send(None, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    refused(pb_utils.TritonModelException, CLOSED, lambda: sender.send(pb_utils.InferenceResponse()))


def decoupled_check_the_last_response_may_be_one_and_an_error_is_like_a_response(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)))
    sender.send(response=pb_utils.InferenceResponse(), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    refused(pb_utils.TritonModelException, CLOSED, lambda: sender.send(pb_utils.InferenceResponse()))


def decoupled_check_wrong_flags_close_nothing(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    refused(pb_utils.TritonModelException, None, lambda: sender.send(pb_utils.InferenceResponse(), 2))
    refused(pb_utils.TritonModelException, None, sender.send)
    sender.send(pb_utils.InferenceResponse())
    sender.send(flags=1)


def decoupled_check_what_nobody_asked_for_leaves_the_response(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    tensors = [pb_utils.Tensor(name, np.array([b"x"], object)) for name in ("REPORT", "OTHER")]
    response = pb_utils.InferenceResponse(tensors)
    sender.send(response)
    same([tensor.name() for tensor in response.output_tensors()], ["REPORT"])
    sender.send(flags=1)
