"""Answers with what it was told of a request."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([self.told(request)], object))])
            for request in requests
        ]

    def told(self, request):
        parameters = sorted(json.loads(request.parameters()).items())
        facts = [request.request_id(), request.correlation_id(), request.flags(), request.timeout()]
        facts += [f"{name}={value}" for name, value in parameters]
        facts += [*request.requested_output_names(), *(tensor.name() for tensor in request.inputs())]
        return "|".join(map(str, facts))
