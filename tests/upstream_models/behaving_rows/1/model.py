"""Does what the parameter `do` says, right or wrong."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def facts_of(request):
    return {
        "request_id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "outputs": sorted(request.requested_output_names()),
        "parameters": json.loads(request.parameters() or "{}"),
        "inputs": sorted(
            [tensor.name(), str(tensor.as_numpy().dtype), list(tensor.shape())] for tensor in request.inputs()
        ),
    }


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        parameters = json.loads(requests[0].parameters() or "{}")
        x = requests[0].inputs()[0].as_numpy()
        y = pb_utils.Tensor("Y", x)
        fine = [pb_utils.InferenceResponse([y]) for _ in requests]
        do = parameters.get("do", "")
        if do == "raise":
            raise ValueError("broken")
        if do == "raise nothing of ours":
            raise SystemExit(3)
        if do == "other names":
            return [pb_utils.InferenceResponse([y, pb_utils.Tensor("Z", x)])]
        returned = {
            "few": [],
            "many": fine + fine,
            "tuple": tuple(fine),
            "str": ["x"],
            "dtype": [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.astype(np.int64))])],
            "unknown": [pb_utils.InferenceResponse([pb_utils.Tensor("Z", x)])],
            "no outputs": [pb_utils.InferenceResponse([])],
            "shape": [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros((2, 3), np.float32))])],
            "error": [pb_utils.InferenceResponse([], pb_utils.TritonError("my error"))],
            "not found": [
                pb_utils.InferenceResponse([], pb_utils.TritonError("not there", pb_utils.TritonError.NOT_FOUND))
            ],
            "facts": [pb_utils.InferenceResponse([], pb_utils.TritonError(json.dumps(facts_of(requests[0]))))],
            "args": [pb_utils.InferenceResponse([], pb_utils.TritonError(json.dumps(self.args)))],
        }
        return returned.get(do, fine)
