"""Inverts every bit, the second half of them after `sleep_ms`; writes what it refused to the server's log."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = self.session.serve(requests, self.infer)
        for response in responses:
            if response.has_error():
                pb_utils.Logger.log_info(f"soak refused: {response.error().message()}")
        return responses

    def infer(self, call: Call) -> None:
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        middle = x.shape[0] // 2
        np.invert(x.numpy()[:middle], out=y.numpy()[:middle])
        time.sleep(call.parameters["sleep_ms"] / 1000)
        np.invert(x.numpy()[middle:], out=y.numpy()[middle:])

    def finalize(self) -> None:
        self.session.close()
