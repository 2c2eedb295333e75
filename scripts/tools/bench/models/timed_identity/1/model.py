import json
import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        inputs = json.loads(args["model_config"])["input"]
        self.names = [(tensor["name"], tensor["name"].replace("X", "Y")) for tensor in inputs]
        self.times_ns = []

    def execute(self, requests):
        if "Y0" not in requests[0].requested_output_names():
            return self.session.serve(requests, self.tell)
        begin = time.perf_counter_ns()
        responses = self.session.serve(requests, self.infer)
        self.times_ns.append(time.perf_counter_ns() - begin)
        return responses

    def infer(self, call: Call) -> None:
        for source, target in self.names:
            x = call.input(source)
            y = call.output(target, x.shape, x.dtype)
            np.copyto(y.numpy(), x.numpy())

    def tell(self, call: Call) -> None:
        call.put("TIMES_NS", np.array(self.times_ns, np.int64))

    def finalize(self):
        self.session.close()
