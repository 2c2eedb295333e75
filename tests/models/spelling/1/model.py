"""Takes strings and gives strings, as plain models do."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        (tensor,) = request.inputs()
        words = tensor.as_numpy()
        loud = np.array([word.upper() for word in words], np.object_)
        lengths = np.array([len(word) for word in words], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LOUD", loud), pb_utils.Tensor("LENGTHS", lengths)])
