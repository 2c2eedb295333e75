"""Talks to its client through the tensors' memory while the request is still running."""

import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

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

    def finalize(self):
        self.session.close()
