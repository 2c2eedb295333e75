"""Requests: what a model reads of one, and how it makes one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .expecting import named, refused, same


def _made(pb_utils: Any, **given: Any) -> Any:
    return pb_utils.InferenceRequest(**{"model_name": "echo", "inputs": [], "requested_output_names": [], **given})


def check_a_request_has_what_the_client_said(pb_utils: Any, request: Any) -> None:
    same(request.request_id(), "the-id")
    same(request.correlation_id(), 42)
    same(request.flags(), pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
    same(request.timeout(), 9_000_000)
    same(request.requested_output_names(), {"REPORT"})
    assert request.is_cancelled() is False


def check_parameters_are_json_of_every_type(pb_utils: Any, request: Any) -> None:
    text = request.parameters()
    assert type(text) is str
    found = json.loads(text)
    same({name: found[name] for name in ("number", "yes", "half", "word")}, {
        "number": 7, "yes": True, "half": 0.5, "word": 'ü"/\n'
    })  # fmt: skip
    assert '"number":7' in text


def check_inputs_have_names_shapes_and_types(pb_utils: Any, request: Any) -> None:
    found = {tensor.name(): tensor.shape() for tensor in request.inputs()}
    same(found, {"X": [2, 3], "WORDS": [3], "HALF": [2], "FLAGS": [2]})
    assert all(tensor.is_cpu() for tensor in request.inputs())
    same(named(request, "X").as_numpy().dtype, np.dtype(np.float32))
    same(named(request, "X").as_numpy().tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    same(named(request, "FLAGS").as_numpy().dtype, np.dtype(bool))
    same(named(request, "FLAGS").as_numpy().tolist(), [True, False])


def check_an_inputs_array_is_writable_and_the_same_each_time(pb_utils: Any, request: Any) -> None:
    tensor = named(request, "X")
    array = tensor.as_numpy()
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert tensor.as_numpy() is array
    array[0, 0] = 99
    same(float(named(request, "X").as_numpy()[0, 0]), 99.0)


def check_what_dlpack_sees_of_an_input_is_other_memory(pb_utils: Any, request: Any) -> None:
    tensor = named(request, "X")
    tensor.as_numpy()[:] = 99
    same(np.from_dlpack(tensor).tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def check_an_inputs_array_outlives_its_tensor(pb_utils: Any, request: Any) -> None:
    array = named(request, "X").as_numpy()
    same(float(array.sum()), 15.0)


def check_a_response_sender_is_the_same_each_time(pb_utils: Any, request: Any) -> None:
    assert request.get_response_sender() is request.get_response_sender()
    assert request.get_response_sender().is_cancelled() is False


def check_a_trace_without_context_has_none(pb_utils: Any, request: Any) -> None:
    assert request.trace().get_context() is None


def check_what_a_request_is_made_of(pb_utils: Any, request: Any) -> None:
    made = _made(
        pb_utils, request_id="r", correlation_id="s", flags=3, timeout=5, parameters={"a": "ü", "b": True, "c": 3}
    )
    same(made.request_id(), "r")
    same(made.correlation_id(), "s")
    same((made.flags(), made.timeout()), (3, 5))
    same(json.loads(made.parameters()), {"a": "ü", "b": True, "c": 3})


def check_what_a_request_has_by_default(pb_utils: Any, request: Any) -> None:
    made = _made(pb_utils)
    same((made.request_id(), made.correlation_id(), made.flags(), made.timeout()), ("", 0, 0, 0))
    same(made.parameters(), "{}")
    same(made.inputs(), [])
    same(made.requested_output_names(), set())
    assert made.trace().get_context() is None


def check_a_correlation_id_is_a_number_or_a_text(pb_utils: Any, request: Any) -> None:
    same(_made(pb_utils, correlation_id=2**63).correlation_id(), 2**63)
    same(_made(pb_utils, correlation_id="").correlation_id(), "")
    text = "Correlation ID must be integer or string"
    refused(pb_utils.TritonModelException, text, lambda: _made(pb_utils, correlation_id=1.5))
    refused(RuntimeError, None, lambda: _made(pb_utils, correlation_id=-1))
    refused(RuntimeError, None, lambda: _made(pb_utils, correlation_id=2**64))
    refused(TypeError, None, lambda: _made(pb_utils, correlation_id=None))


def check_parameters_of_other_types_are_refused(pb_utils: Any, request: Any) -> None:
    start = "Expect parameters"
    error = pb_utils.TritonModelException
    text = f"{start} values to have type bool/int/str, found type <class 'float'>"
    refused(error, text, lambda: _made(pb_utils, parameters={"a": 1.5}))
    text = f"{start} values to have type bool/int/str, found type <class 'NoneType'>"
    refused(error, text, lambda: _made(pb_utils, parameters={"a": None}))
    refused(
        error, f"{start} keys to have type str, found type <class 'int'>", lambda: _made(pb_utils, parameters={1: "a"})
    )
    text = "Expect N8pybind114dictE, got <class 'list'>"
    refused(error, text, lambda: _made(pb_utils, parameters=[1]))


def check_a_missing_input_is_refused(pb_utils: Any, request: Any) -> None:
    text = "Input tensor for request with id 'r' and model name 'echo' should not be empty."
    refused(pb_utils.TritonModelException, text, lambda: _made(pb_utils, request_id="r", inputs=[None]))


def check_an_output_without_a_name_is_refused(pb_utils: Any, request: Any) -> None:
    text = "Requested output name for request with id '' and model name 'echo' should not be empty."
    refused(pb_utils.TritonModelException, text, lambda: _made(pb_utils, requested_output_names=["Y", ""]))


def check_nobody_sends_to_a_request_of_ones_own(pb_utils: Any, request: Any) -> None:
    sender = _made(pb_utils).get_response_sender()
    text = "Unable to send response. Response sender has no reference to the decoupled state of the model."
    refused(pb_utils.TritonModelException, text, lambda: sender.send(pb_utils.InferenceResponse()))
