from __future__ import annotations

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession

SMALLEST = 100  # pixels; what is smaller is dirt


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        gray = cv2.cvtColor(call.input("PICTURE").numpy(), cv2.COLOR_BGR2GRAY)
        _, bright = cv2.threshold(gray, 0, 255, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
        _, _, found, _ = cv2.connectedComponentsWithStats(bright)
        things = found[1:]  # the first is the background
        call.put("BOXES", things[things[:, cv2.CC_STAT_AREA] >= SMALLEST].astype(np.int32, copy=False))

    def finalize(self) -> None:
        self.session.close()
