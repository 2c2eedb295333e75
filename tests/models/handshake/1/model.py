"""Talks to its client through the tensors' memory while the request is still running."""

import time

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        question = call.input("QUESTION").numpy()
        answer = call.output("ANSWER", (2,), np.int64).numpy()
        answer[0] = question[0] + 1  # the client sees this before the response
        deadline = time.monotonic() + 10
        while (
            question[1] == 0 and time.monotonic() < deadline
        ):  # the client writes this after it has seen the first answer
            time.sleep(0.001)
        answer[1] = question[1] + 1
