"""Y = 2 X over the whole batch; FACTS tells each row the size of its batch, its place in it, how many bytes had been
copied when the inputs were one array, and whether the outputs are one array in the clients' own memory.
"""

import numpy as np

from tests.served import Served


class TritonPythonModel(Served):
    def execute(self, requests):
        return self.session.serve_batch(requests, self.infer)

    def infer(self, batch):
        x = batch.input("X")
        gathered_bytes = batch.gathered_bytes
        y = batch.output("Y", x.shape[1:], x.dtype)
        np.multiply(x.numpy(), 2, out=y.numpy())
        if batch.requested("FACTS"):
            facts = np.empty((batch.size, 4), np.int64)
            facts[:, 0] = batch.size
            facts[:, 1] = np.arange(batch.size)
            facts[:, 2] = gathered_bytes
            facts[:, 3] = y.path == "direct"
            batch.put("FACTS", facts)
