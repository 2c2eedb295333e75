"""Fails every request."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("it is full", pb_utils.TritonError.UNAVAILABLE)
        return [pb_utils.InferenceResponse([], error) for _ in requests]
