"""What models must not say: the errors that mypy and pyright have for each line are at its end. Never executed."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils
from c_python_backend_utils import InferenceResponseSender

X = np.ones(3, np.float32)
TENSOR = pb_utils.Tensor("X", X)


def say(request: pb_utils.InferenceRequest, sender: InferenceResponseSender) -> None:
    pb_utils.Tensor("X", array=X)  # E: call-arg, reportCallIssue
    pb_utils.Tensor("X", [1.0])  # E: arg-type, reportArgumentType
    pb_utils.Tensor.from_dlpack("X", [1.0])  # E: arg-type, reportArgumentType
    pb_utils.get_input_tensor_by_name(request, "X").as_numpy()  # E: union-attr, reportOptionalMemberAccess
    request.exec().error().message()  # E: union-attr, reportOptionalMemberAccess
    request.exec(decoupled=True).has_error()  # E: attr-defined, reportAttributeAccessIssue
    request.async_exec().has_error()  # E: attr-defined, reportAttributeAccessIssue
    request.parameters()["count"]  # E: index, reportArgumentType
    request.set_release_flags(flags=1)  # E: call-arg, reportCallIssue
    request.input("X")  # E: attr-defined, reportAttributeAccessIssue
    pb_utils.InferenceRequest([TENSOR], ["Y"], "model")  # E: call-overload, reportCallIssue
    pb_utils.InferenceRequest(model_name="model", inputs=[TENSOR])  # E: call-overload, reportCallIssue
    pb_utils.InferenceRequest(
        model_name="m",
        inputs=[TENSOR],
        requested_output_names=[],
        parameters={"a": 1.5},  # E: dict-item, reportArgumentType
    )
    pb_utils.InferenceResponse(TENSOR)  # E: arg-type, reportArgumentType
    pb_utils.InferenceResponse([X])  # E: list-item, reportArgumentType
    pb_utils.InferenceResponse(error="it failed")  # E: arg-type, reportArgumentType
    pb_utils.TritonError("it failed", 3)  # E: arg-type, reportArgumentType
    pb_utils.TritonError("it failed", pb_utils.TritonError.TIMEOUT)  # E: attr-defined, reportAttributeAccessIssue
    sender.send()  # E: call-overload, reportCallIssue
    sender.send(None)  # E: call-overload, reportArgumentType
    pb_utils.Logger.log("so", "INFO")  # E: arg-type, reportArgumentType
    pb_utils.Logger.log_warning("so")  # E: attr-defined, reportAttributeAccessIssue
    pb_utils.MetricFamily("m", "so", "COUNTER")  # E: arg-type, reportArgumentType
    pb_utils.MetricFamily("m", "so", pb_utils.MetricFamily.COUNTER).Metric({"a": 1})  # E: dict-item, reportArgumentType
    pb_utils.load_model("m", files={"file:1/model.py": "text"})  # E: dict-item, reportArgumentType
    pb_utils.is_model_ready("m", 1)  # E: arg-type, reportArgumentType
    pb_utils.InferenceResponseSender  # E: attr-defined, reportAttributeAccessIssue
    raise pb_utils.TritonError("it failed")  # E: misc, reportGeneralTypeIssues
