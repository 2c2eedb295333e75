from typing import Any

import torch

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        logits = call.input("LOGITS")
        probabilities = call.output("PROBABILITIES", logits.shape, logits.dtype)
        torch.softmax(torch.from_dlpack(logits), dim=0, out=torch.from_dlpack(probabilities))

    def finalize(self) -> None:
        self.session.close()
