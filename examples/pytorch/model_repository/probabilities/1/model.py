from __future__ import annotations

import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        logits = call.input("LOGITS")
        probabilities = call.output("PROBABILITIES", logits.shape, logits.dtype)
        torch.softmax(from_dlpack(logits), dim=0, out=from_dlpack(probabilities))

    def finalize(self) -> None:
        self.session.close()
