from __future__ import annotations

import torch
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "LOGITS"), None)
        y = torch.softmax(torch.from_numpy(x), dim=0).numpy()
        return pb_utils.InferenceResponse([self.backend.output("PROBABILITIES", y)])
