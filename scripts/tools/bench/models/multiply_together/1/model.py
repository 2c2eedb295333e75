import time

import numpy as np

from shm_backend_utils.model import BatchCall, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.told = []
        self.gathered_bytes = 0

    def execute(self, requests):
        begin = time.perf_counter_ns()
        responses = self.session.serve_batch(requests, self.infer)
        self.told += [len(requests), time.perf_counter_ns() - begin, self.gathered_bytes]
        return responses

    def infer(self, batch: BatchCall) -> None:
        if batch.requested("TOLD"):
            batch.put("TOLD", np.array([self.told] * batch.size, np.int64))
            self.told = []
            return
        x = batch.input("X")
        np.multiply(x.numpy(), 2, out=batch.output("Y", x.shape[1:], x.dtype).numpy())
        self.gathered_bytes = batch.gathered_bytes

    def finalize(self):
        self.session.close()
