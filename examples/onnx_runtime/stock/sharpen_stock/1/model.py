from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session
        file = Path(__file__).parents[2] / "sharpen" / "1" / "model.onnx"
        self.network: Any = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "PICTURE"), None)
        (y,) = self.network.run(None, {"x": x})
        return pb_utils.InferenceResponse([self.backend.output("SHARPENED", y)])
