"""What models of Triton's Python backend may say, and what a type checker makes of it. Never executed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from typing_extensions import CapsuleType, assert_type

if TYPE_CHECKING:
    from c_python_backend_utils import InferenceResponseSender, InferenceTrace, Metric, ResponseIterator  # noqa: F401  # named in strings


class AddSub:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config = auto_complete_model_config.as_dict()
        names = [tensor["name"] for tensor in config["input"]]
        inputs: list[dict[str, Any]] = [
            {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]},
            {"name": "INPUT1", "data_type": "TYPE_FP32", "dims": [4], "optional": True},
        ]
        for tensor in inputs:
            if tensor["name"] not in names:
                auto_complete_model_config.add_input(tensor)
        auto_complete_model_config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_dynamic_batching()
        auto_complete_model_config.set_model_transaction_policy({"decoupled": False})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        assert output is not None
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.is_decoupled: bool = pb_utils.using_decoupled_model_transaction_policy(config)
        family = pb_utils.MetricFamily("calls", description="so far", kind=pb_utils.MetricFamily.COUNTER)
        self.calls: Metric = family.Metric(labels={"model": args["model_name"]})
        waits = pb_utils.MetricFamily(name="waits", description="in s", kind=pb_utils.MetricFamily.HISTOGRAM)
        waits.Metric(buckets=[0.1, 1, 10]).observe(2)
        assert_type(self.calls.value(), float)
        assert_type(pb_utils.get_model_dir(), str)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        self.calls.increment(len(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse | None:
        if request.is_cancelled():
            error = pb_utils.TritonError("nobody waits", pb_utils.TritonError.CANCELLED)
            assert_type(error.code().name, str)
            return pb_utils.InferenceResponse(error=error)
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        assert_type(tensor, pb_utils.Tensor | None)
        if tensor is None:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        x = tensor.as_numpy()
        assert_type(x, npt.NDArray[Any])
        parameters: dict[str, int] = json.loads(request.parameters())
        pb_utils.Logger.log(f"{request.request_id()} of {request.correlation_id()}", pb_utils.Logger.VERBOSE)
        output = pb_utils.Tensor("OUTPUT0", (x + 1).astype(self.dtype))
        return pb_utils.InferenceResponse([output], parameters=parameters)


class ByDlpack:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [pb_utils.InferenceResponse([self.passed_on(tensor) for tensor in r.inputs()]) for r in requests]

    def passed_on(self, tensor: pb_utils.Tensor) -> pb_utils.Tensor:
        assert_type(tensor.to_dlpack(), CapsuleType)
        assert_type(tensor.shape(), list[int])
        y: npt.NDArray[Any] = np.from_dlpack(tensor)
        by_object = pb_utils.Tensor.from_dlpack("Y", y)
        return pb_utils.Tensor.from_dlpack(by_object.name(), tensor.to_dlpack())


class Decoupled:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self.answer(request.get_response_sender(), request.inputs())

    def answer(
        self,
        sender: InferenceResponseSender,
        tensors: list[pb_utils.Tensor],
        last: pb_utils.InferenceResponse | None = None,
    ) -> None:
        for tensor in tensors:
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(last, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        sender.send(pb_utils.InferenceResponse(), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Calling:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        response = self.request("add_sub", request.inputs(), request.trace()).exec()
        assert_type(response, pb_utils.InferenceResponse)
        if response.has_error():
            error = response.error()
            raise pb_utils.TritonModelException("" if error is None else error.message())
        responses = self.request("repeat", response.output_tensors(), request.trace()).exec(decoupled=True)
        assert_type(responses, "ResponseIterator")
        for one in responses:
            assert_type(pb_utils.get_output_tensor_by_name(one, "OUT"), pb_utils.Tensor | None)
            responses.cancel()
        return pb_utils.InferenceResponse(response.output_tensors())

    def request(self, model: str, inputs: list[pb_utils.Tensor], trace: InferenceTrace) -> pb_utils.InferenceRequest:
        counts = {"COUNT": 3}
        by_position = pb_utils.InferenceRequest("7", 1, inputs, ["OUT"], model, parameters=counts)
        assert_type(by_position.timeout(), int)
        return pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=["OUT"],
            inputs=inputs,
            correlation_id="sequence",
            flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
            trace=trace,
            parameters={"a": 1, "b": "x", "c": True},
        )


class CallingAsync:
    async def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        if not pb_utils.is_model_ready("add_sub", "1"):
            pb_utils.load_model("add_sub", config="{}", files={"file:1/model.py": b""})
        calls = [
            pb_utils.InferenceRequest(model_name="add_sub", inputs=r.inputs(), requested_output_names=["OUT"])
            for r in requests
        ]
        assert_type(await calls[0].async_exec(), pb_utils.InferenceResponse)
        assert_type(await calls[0].async_exec(decoupled=True), "ResponseIterator")
        responses = await asyncio.gather(*[call.async_exec() for call in calls])
        assert_type(responses, list[pb_utils.InferenceResponse])
        pb_utils.unload_model("add_sub", unload_dependents=True)
        return [pb_utils.InferenceResponse(response.output_tensors()) for response in responses]


def strings() -> None:
    words = np.array(["a", b"b"], np.object_)
    assert_type(pb_utils.serialize_byte_tensor(words), bytes | tuple[()])
    assert_type(pb_utils.deserialize_bytes_tensor(b"\1\0\0\0a"), npt.NDArray[np.object_])
    pb_utils.serialize_byte_tensor(np.array([b"a"]))
