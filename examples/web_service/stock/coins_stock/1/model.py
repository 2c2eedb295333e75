from __future__ import annotations

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend

SMALLEST = 100


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "PICTURE"), None)
        _, bright = cv2.threshold(cv2.cvtColor(x, cv2.COLOR_BGR2GRAY), 0, 255, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
        _, _, found, _ = cv2.connectedComponentsWithStats(bright)
        things = found[1:]
        y = things[things[:, cv2.CC_STAT_AREA] >= SMALLEST].astype(np.int32, copy=False)
        return pb_utils.InferenceResponse([self.backend.output("BOXES", y)])
