"""Adds and multiplies on a GPU that does not exist. Tells how many requests it was given at once, and how often it has
waited for the GPU before them. Lets go of memory soon after its client has.
"""

import numpy as np

from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping import resolver
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.served import Served

resolver.SWEEP_INTERVAL_S = 0.05

DRIVER = FakeDriver.load()


class TritonPythonModel(Served):
    def initialize(self, args):
        super().initialize(args)
        self.stream = 0

    def execute(self, requests):
        self.requests = len(requests)
        self.waits = DRIVER.count("cuCtxSynchronize")
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        if not self.stream:
            self.stream = self.session._open_context().arrays.runtime.create_stream(0)
        a, b = (call.to_device(call.input(name), self.stream) for name in ("A", "B"))
        total, product = (call.device_output(name, a.shape, a.dtype) for name in ("SUM", "PRODUCT"))
        self.launch(np.add, a, b, total.array)
        self.launch(np.multiply, a, b, product.array)
        rows = (a.shape[0], 1)
        call.output("REQUESTS", rows, np.int32).numpy()[:] = self.requests
        call.output("WAITS", rows, np.int32).numpy()[:] = self.waits

    def launch(self, function, a, b, out):
        a, b, out = (DRIVER.memory(each.address, each.shape, each.dtype) for each in (a, b, out))
        DRIVER.launch(self.stream, lambda: function(a, b, out=out))
