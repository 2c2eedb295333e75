"""Adds and multiplies on a GPU that does not exist. Tells how many requests it was given at once, and how often it has
waited for the GPU before them. Lets go of memory soon after its client has.
"""

import numpy as np

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping import resolver
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel

resolver.SWEEP_INTERVAL_S = 0.05


class TritonPythonModel:
    def initialize(self, args):
        self.cuda = FakeCuda()
        self.session = ShmSession.from_args(args, cuda=CudaAccess(lambda: self.cuda))

    def execute(self, requests):
        self.requests = len(requests)
        self.waits = [name for name, _ in self.cuda.log].count("synchronize")
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        a, b = call.to_device(call.input("A")), call.to_device(call.input("B"))
        total, product = (call.device_output(name, a.shape, a.dtype) for name in ("SUM", "PRODUCT"))
        with call.stream:
            kernel(lambda a, b, out: np.add(a, b, out=out), a, b, total.cupy())
            kernel(lambda a, b, out: np.multiply(a, b, out=out), a, b, product.cupy())
        rows = (a.shape[0], 1)
        call.output("REQUESTS", rows, np.int32).numpy()[:] = self.requests
        call.output("WAITS", rows, np.int32).numpy()[:] = self.waits

    def finalize(self):
        self.session.close()
