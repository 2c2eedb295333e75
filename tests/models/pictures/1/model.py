"""OUTPUT0 is the beginning of each picture, OUTPUT1 the beginning of INPUT1 plus the sum of each row.

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
        pictures, numbers = (
            self.backend.input(pb_utils.get_input_tensor_by_name(request, name), None) for name in ("INPUT0", "INPUT1")
        )
        outputs = {
            "OUTPUT0": pictures.reshape(len(pictures), -1)[:, :512].copy(),
            "OUTPUT1": (numbers[:, :5] + numbers.sum(axis=1, keepdims=True)).astype(np.int32),
        }
        return pb_utils.InferenceResponse([self.backend.output(name, array) for name, array in outputs.items()])
