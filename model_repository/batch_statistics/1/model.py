from typing import Any

import numpy as np

from shm_backend_utils.model import BatchCall, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve_batch(requests, self.infer)  # infer runs once, not once per request

    def infer(self, batch: BatchCall) -> None:
        images = batch.input("IMAGE").numpy()  # the rows of all requests, [batch.size, 3, 224, 224]
        mean = batch.output("MEAN", (3,), np.float32)  # the shape of a row
        images.mean(axis=(2, 3), out=mean.numpy())
        if batch.requested("STD"):
            std = batch.output("STD", (3,), np.float32)
            images.std(axis=(2, 3), out=std.numpy())

    def finalize(self) -> None:
        self.session.close()
