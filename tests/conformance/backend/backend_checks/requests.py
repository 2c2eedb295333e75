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
    assert request.trace().get_context() is None
    assert request.get_response_sender() is request.get_response_sender()
    assert request.get_response_sender().is_cancelled() is False
    text = request.parameters()
    found = json.loads(text)
    expected = {"number": 7, "yes": True, "half": 0.5, "word": 'ü"/\n'}
    same({name: found[name] for name in expected}, expected)
    assert '"number":7' in text


def check_inputs_have_names_shapes_and_types(pb_utils: Any, request: Any) -> None:
    found = {tensor.name(): tensor.shape() for tensor in request.inputs()}
    same(found, {"X": [2, 3], "WORDS": [3], "HALF": [2], "FLAGS": [2]})
    assert all(tensor.is_cpu() for tensor in request.inputs())
    same(named(request, "X").as_numpy().dtype, np.dtype(np.float32))
    same(named(request, "X").as_numpy().tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    same(named(request, "FLAGS").as_numpy().dtype, np.dtype(bool))
    same(named(request, "FLAGS").as_numpy().tolist(), [True, False])


def check_an_inputs_array_is_writable_the_same_and_not_what_dlpack_sees(pb_utils: Any, request: Any) -> None:
    tensor = named(request, "X")
    array = tensor.as_numpy()
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert tensor.as_numpy() is array
    array[:] = 99
    same(float(named(request, "X").as_numpy()[0, 0]), 99.0)
    same(np.from_dlpack(tensor).tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    del tensor
    same(float(array.sum()), 594.0)


def check_what_a_request_is_made_of_and_has_by_default(pb_utils: Any, request: Any) -> None:
    made = _made(
        pb_utils, request_id="r", correlation_id="s", flags=3, timeout=5, parameters={"a": "ü", "b": True, "c": 3}
    )
    same((made.request_id(), made.correlation_id(), made.flags(), made.timeout()), ("r", "s", 3, 5))
    same(json.loads(made.parameters()), {"a": "ü", "b": True, "c": 3})
    made = _made(pb_utils)
    same((made.request_id(), made.correlation_id(), made.flags(), made.timeout()), ("", 0, 0, 0))
    same((made.parameters(), made.inputs(), made.requested_output_names()), ("{}", [], set()))
    assert made.trace().get_context() is None


def check_a_correlation_id_is_a_number_or_a_text(pb_utils: Any, request: Any) -> None:
    same(_made(pb_utils, correlation_id=2**63).correlation_id(), 2**63)
    same(_made(pb_utils, correlation_id="").correlation_id(), "")
    text = "Correlation ID must be integer or string"
    refused(pb_utils.TritonModelException, text, lambda: _made(pb_utils, correlation_id=1.5))
    refused(RuntimeError, None, lambda: _made(pb_utils, correlation_id=-1))
    refused(RuntimeError, None, lambda: _made(pb_utils, correlation_id=2**64))
    refused(TypeError, None, lambda: _made(pb_utils, correlation_id=None))


def check_what_no_request_is_made_of_is_refused(pb_utils: Any, request: Any) -> None:
    whose = "for request with id 'r' and model name 'echo' should not be empty."
    values = "Expect parameters values to have type bool/int/str, found type"
    for text, given in (
        (f"{values} <class 'float'>", {"parameters": {"a": 1.5}}),
        (f"{values} <class 'NoneType'>", {"parameters": {"a": None}}),
        ("Expect parameters keys to have type str, found type <class 'int'>", {"parameters": {1: "a"}}),
        ("Expect N8pybind114dictE, got <class 'list'>", {"parameters": [1]}),
        (f"Input tensor {whose}", {"inputs": [None]}),
        (f"Requested output name {whose}", {"requested_output_names": ["Y", ""]}),
    ):
        refused(pb_utils.TritonModelException, text, _made, pb_utils, request_id="r", **given)


def check_nobody_sends_to_a_request_of_ones_own(pb_utils: Any, request: Any) -> None:
    sender = _made(pb_utils).get_response_sender()
    text = "Unable to send response. Response sender has no reference to the decoupled state of the model."
    refused(pb_utils.TritonModelException, text, lambda: sender.send(pb_utils.InferenceResponse()))
