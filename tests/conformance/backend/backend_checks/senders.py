"""Response senders: of models that are decoupled, and of one that is not."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import refused, same

SEND = "Unable to send response."
CLOSED = f"{SEND} Response sender has been closed."


def check_flags_are_0_or_final(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    for flags in (2, 3, 2**32 - 1):
        refused(
            pb_utils.TritonModelException,
            f"{SEND} Unsupported flag provided.",
            sender.send,
            pb_utils.InferenceResponse(),
            flags,
        )


def check_nothing_is_sent_with_the_last_flag_alone(pb_utils: Any, request: Any) -> None:
    text = "Inference Response object must be provided when the response flags is set to zero."
    sender = request.get_response_sender()
    refused(pb_utils.TritonModelException, text, sender.send)
    refused(pb_utils.TritonModelException, text, lambda: sender.send(None, 0))


def check_who_is_not_decoupled_ends_with_a_response(pb_utils: Any, request: Any) -> None:
    text = f"{SEND} Non-decoupled model cannot send complete final before sending a response."
    sender = request.get_response_sender()
    refused(pb_utils.TritonModelException, text, lambda: sender.send(flags=1))


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


def decoupled_check_the_last_response_may_be_one(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
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


def decoupled_check_an_error_is_sent_like_a_response(pb_utils: Any, request: Any) -> None:
    sender = request.get_response_sender()
    sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)))
    sender.send(flags=1)
