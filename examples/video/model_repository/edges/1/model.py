from __future__ import annotations

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        frame = call.input("FRAME").numpy()
        edges = call.output("EDGES", frame.shape[:2], np.uint8).numpy()
        cv2.Canny(cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY), 50, 150, edges=edges)

    def finalize(self) -> None:
        self.session.close()
