"""Y = 2 X over the whole batch; FACTS tells each row the size of its batch, its place in it, how many bytes had been
copied when the inputs were one array, and whether the outputs are one array in the clients' own memory.

The parameter `deed` of a request tells what is done wrong, or else; see the code.
"""

import time

import numpy as np

from tests.served import Served

PATIENCE_S = 30


class TritonPythonModel(Served):
    def execute(self, requests):
        return self.session.serve_batch(requests, self.infer)

    def infer(self, batch):
        x = batch.input("X")
        gathered_bytes = batch.gathered_bytes
        deeds = {call.parameters.get("deed") for call in batch.calls}
        if "wait" in deeds:  # until the client has written
            wait_for(lambda: x.numpy()[0, 0] != 0)
        if "pass on" in deeds:
            batch.put("Y", x)
            return
        if "one row less" in deeds:
            batch.put("Y", x.numpy()[1:])
        y = batch.output("Y", x.shape[1:], x.dtype)
        np.multiply(x.numpy(), 2, out=y.numpy())
        if "raise" in deeds:
            raise RuntimeError("the model gave up on the batch")
        if batch.requested("FACTS"):
            facts = np.empty((batch.size, 4), np.int64)
            facts[:, 0] = batch.size
            facts[:, 1] = np.arange(batch.size)
            facts[:, 2] = gathered_bytes
            facts[:, 3] = y.path == "direct"
            batch.put("FACTS", facts)


def wait_for(is_so):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
