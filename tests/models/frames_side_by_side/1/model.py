"""Two streams at a time, in one `execute`: response i is the input plus i."""

import numpy as np

from shm_backend_utils.model import ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call):
        x = call.input("X").numpy()
        if call.parameters.get("fail"):
            raise RuntimeError("the model gave up on one stream")
        for i in range(call.parameters["count"]):
            np.add(x, np.float32(i), out=call.output("Y", x.shape, x.dtype).numpy())
            yield

    def finalize(self):
        self.session.close()
