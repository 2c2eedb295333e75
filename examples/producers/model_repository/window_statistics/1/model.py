from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        window = call.input("WINDOW").numpy()
        window.min(axis=1, out=call.output("MIN", window.shape[:1], np.float32).numpy())
        window.max(axis=1, out=call.output("MAX", window.shape[:1], np.float32).numpy())

    def finalize(self) -> None:
        self.session.close()
