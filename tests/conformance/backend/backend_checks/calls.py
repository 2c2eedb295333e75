"""Calls of other models (BLS), and models that are loaded and asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from .expecting import FREES_SAFELY, kills_the_server, refused, same, since

UNKNOWN = "Model {0} - Error when running inference: Request for unknown model: '{0}' is not found"
WHERE = "Failed to process the request for model 'checks_0_0', message: "
NOT_KNOWN = f"Failed to check model readiness: {WHERE}Request for unknown model: "


def _call(pb_utils: Any, **given: Any) -> Any:
    defaults = {
        "model_name": "echo",
        "inputs": [pb_utils.Tensor("X", np.arange(3, dtype=np.float32))],
        "requested_output_names": ["Y"],
    }
    return pb_utils.InferenceRequest(**{**defaults, **given})


def _said(response: Any) -> Any:
    if response.has_error():
        return response.error().message()
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def check_a_call_comes_back_each_time_and_with_all_outputs_if_it_names_none(pb_utils: Any, request: Any) -> None:
    call = _call(pb_utils)
    response = call.exec()
    assert isinstance(response, pb_utils.InferenceResponse)
    assert response.output_tensors()[0].as_numpy().flags.writeable
    for each in (response, call.exec(), _call(pb_utils, requested_output_names=[]).exec()):
        same(_said(each), {"Y": [0.0, 1.0, 2.0]})


def check_an_input_is_what_it_was_when_it_was_sent_first(pb_utils: Any, request: Any) -> None:
    array = np.arange(3, dtype=np.float32)
    tensor = pb_utils.Tensor("X", array)
    array[0] = 5
    same(_said(_call(pb_utils, inputs=[tensor]).exec()), {"Y": [5.0, 1.0, 2.0]})
    array[:] = 7
    same(_said(_call(pb_utils, inputs=[tensor]).exec()), {"Y": [5.0, 1.0, 2.0]})
    same(tensor.as_numpy().tolist(), [7.0, 7.0, 7.0])
    same(np.from_dlpack(tensor).tolist(), [5.0, 1.0, 2.0])


def check_an_input_may_be_another_librarys(pb_utils: Any, request: Any) -> None:
    source = np.arange(3, dtype=np.float32)
    tensor = pb_utils.Tensor.from_dlpack("X", pb_utils.Tensor("S", source))
    source[:] = 7
    same(_said(_call(pb_utils, inputs=[tensor]).exec()), {"Y": [7.0, 7.0, 7.0]})


def check_no_elements_travel(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor("X", np.zeros(0, np.float32))
    response = _call(pb_utils, inputs=[tensor]).exec()
    same(_said(response), {"Y": []})
    same(response.output_tensors()[0].shape(), [0])


@since("2.71")
def check_a_model_or_a_version_that_is_not_there(pb_utils: Any, request: Any) -> None:
    text = UNKNOWN.format("none")
    call = _call(pb_utils, model_name="none")
    response = call.exec()
    same((_said(response), response.output_tensors()), (text, []))
    assert response.error().code() == pb_utils.TritonError.INTERNAL
    same([_said(each) for each in call.exec(decoupled=True)], [text])
    text = "Model echo - Error when running inference: Request for unknown model: 'echo' version 3 is not found"
    same(_said(_call(pb_utils, model_version=3).exec()), text)


def check_an_error_of_the_model_comes_as_it_is(pb_utils: Any, request: Any) -> None:
    response = _call(pb_utils, model_name="failing", requested_output_names=[]).exec()
    same(_said(response), "it is full")
    same(response.output_tensors(), [])


@since("2.57")
def check_an_error_of_the_model_keeps_its_code(pb_utils: Any, request: Any) -> None:
    response = _call(pb_utils, model_name="failing", requested_output_names=[]).exec()
    assert response.error().code() == pb_utils.TritonError.UNAVAILABLE


@since("2.57")
def check_responses_may_be_given_up(pb_utils: Any, request: Any) -> None:
    responses = _call(pb_utils, model_name="repeat").exec(decoupled=True)
    same(_said(next(responses)), {"Y": [0.0]})
    same(responses.cancel(), None)
    same(responses.cancel(), None)
    assert list(responses)


def check_a_decoupled_model_needs_the_word(pb_utils: Any, request: Any) -> None:
    text = (
        "Model repeat - Error when running inference: Model repeat is using the decoupled. The current BLS request "
        "call doesn't support models using the decoupled transaction policy. Please use 'decoupled=True' argument to "
        "the 'exec' or 'async_exec' calls for decoupled models.'"
    )
    same(_said(_call(pb_utils, model_name="repeat").exec()), text)


@since(FREES_SAFELY)
def check_responses_of_a_decoupled_model_come_one_by_one_and_again(pb_utils: Any, request: Any) -> None:
    responses = _call(pb_utils, model_name="repeat").exec(decoupled=True)
    same(type(responses).__name__, "ResponseIterator")
    assert iter(responses) is responses
    first = list(responses)
    same([_said(response) for response in first], [{"Y": [0.0]}, {"Y": [1.0]}, {"Y": [2.0]}, {}])
    refused(StopIteration, "Iteration is done for the responses.", lambda: next(responses))
    assert all(one is other for one, other in zip(first, list(responses), strict=True))


@since(FREES_SAFELY)
def check_asynchronous_calls_need_a_loop_and_come_back(pb_utils: Any, request: Any) -> None:
    async def both() -> Any:
        future = _call(pb_utils).async_exec()
        assert isinstance(future, asyncio.Future)
        responses = await _call(pb_utils, model_name="repeat").async_exec(decoupled=True)
        return _said(await future), [_said(response) for response in responses]

    refused(RuntimeError, "no running event loop", lambda: _call(pb_utils).async_exec())
    same(asyncio.run(both()), ({"Y": [0.0, 1.0, 2.0]}, [{"Y": [0.0]}, {"Y": [1.0]}, {"Y": [2.0]}, {}]))


def check_what_a_call_says_of_itself_arrives(pb_utils: Any, request: Any) -> None:
    call = _call(
        pb_utils,
        model_name="told",
        requested_output_names=["TOLD"],
        request_id="inner",
        correlation_id=7,
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
        timeout=5_000_000,
        parameters={"a": "ü", "b": True, "c": -3},
    )
    same(_said(call.exec()), {"TOLD": ["inner|7|2|5000000|a=ü|b=True|c=-3|TOLD|X".encode()]})


def check_a_model_is_ready(pb_utils: Any, request: Any) -> None:
    ready = pb_utils.is_model_ready
    for arguments in (("echo",), ("echo", "1"), ("echo", "1x"), ("echo", " 1"), ("echo", "")):
        same(ready(*arguments), True)
    same(ready(model_name="echo", model_version="1"), True)
    refused(TypeError, None, lambda: ready("echo", 1))
    refused(TypeError, None, lambda: ready(None))


@kills_the_server
def check_a_model_that_is_not_there_is_no_answer(pb_utils: Any, request: Any) -> None:
    for arguments in (("none",), ("",)):
        text = f"{NOT_KNOWN}'{arguments[0]}' is not found"
        refused(pb_utils.TritonModelException, text, pb_utils.is_model_ready, *arguments)
    text = f"{NOT_KNOWN}'echo' version 2 is not found"
    refused(pb_utils.TritonModelException, text, pb_utils.is_model_ready, "echo", "2")
