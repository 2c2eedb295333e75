"""Does what the parameter `do` says, right or wrong."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


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
            "parameters": [pb_utils.InferenceResponse([], pb_utils.TritonError(requests[0].parameters()))],
            "args": [pb_utils.InferenceResponse([], pb_utils.TritonError(json.dumps(self.args)))],
        }
        return returned.get(do, fine)
