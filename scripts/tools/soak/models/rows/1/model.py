"""Inverts every bit of whole batches."""

import numpy as np

from shm_backend_utils.model import BatchCall, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve_batch(requests, self.infer)

    def infer(self, batch: BatchCall) -> None:
        x = batch.input("X")
        np.invert(x.numpy(), out=batch.output("Y", x.shape[1:], x.dtype).numpy())
        batch.output("TOGETHER", (1,), np.int32).numpy()[:] = len(batch.calls)

    def finalize(self):
        self.session.close()
