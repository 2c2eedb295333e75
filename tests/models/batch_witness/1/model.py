"""Adds one, and reports how many requests it was given at once."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def execute(self, requests):
        self.request_count = len(requests)
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.input("X")
        np.add(x.numpy(), 1, out=call.output("Y", x.shape, x.dtype).numpy())
        call.output("REQUEST_COUNT", (x.shape[0], 1), np.int32).numpy()[:] = self.request_count
