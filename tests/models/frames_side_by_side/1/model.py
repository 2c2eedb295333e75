"""Two streams at a time, in one `execute`: response i is the input plus i."""

import numpy as np

from tests.served import Served


class TritonPythonModel(Served):
    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call):
        x = call.input("X").numpy()
        if call.parameters.get("fail"):
            raise RuntimeError("the model gave up on one stream")
        for i in range(call.parameters["count"]):
            np.add(x, np.float32(i), out=call.output("Y", x.shape, x.dtype).numpy())
            yield
