"""Gives its input back, wherever it lies."""

from __future__ import annotations

from typing import Any

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args, CudaAccess())

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        call.put("OUTPUT0", call.input("INPUT0"))

    def finalize(self) -> None:
        self.session.close()
