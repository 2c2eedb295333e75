import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.told = []

    def execute(self, requests):
        begin = time.perf_counter_ns()
        responses = self.session.serve(requests, self.infer)
        self.told += [len(requests), time.perf_counter_ns() - begin, 0]
        return responses

    def infer(self, call: Call) -> None:
        if call.requested("TOLD"):
            call.put("TOLD", np.array([self.told], np.int64))
            self.told = []
            return
        x = call.input("X")
        np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())

    def finalize(self):
        self.session.close()
