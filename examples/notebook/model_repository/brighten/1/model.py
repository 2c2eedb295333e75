from __future__ import annotations

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession

LEVELS = np.arange(256) / 255


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        picture = call.input("PICTURE").numpy()
        brightened = call.output("BRIGHTENED", picture.shape, picture.dtype).numpy()
        table = (LEVELS ** call.parameters.get("gamma", 0.5) * 255).astype(np.uint8)
        cv2.LUT(picture, table, dst=brightened)

    def finalize(self) -> None:
        self.session.close()
