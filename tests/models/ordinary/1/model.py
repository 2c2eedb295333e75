"""Y is X times N, SUM is N plus the number of rows. A row that begins below zero fails the request.

It knows nothing of shared memory; only NumPy's arrays go in and out by this library's means, with any NumPy.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.backend = TritonBackend()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        x, n = (
            self.backend.input(pb_utils.get_input_tensor_by_name(request, name), None).copy() for name in ("X", "N")
        )
        if (x[:, 0] < 0).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("a row begins below zero"))
        outputs = {"Y": x * n.astype(np.float32), "SUM": n + len(x)}
        return pb_utils.InferenceResponse([self.backend.output(name, array) for name, array in outputs.items()])
