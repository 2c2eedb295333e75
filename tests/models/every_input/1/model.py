"""Adds its inputs, all of which it needs, whatever its configuration says."""

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        call.put("Y", np.add(call.input("W").numpy(), call.input("X").numpy()))

    def finalize(self):
        self.session.close()
