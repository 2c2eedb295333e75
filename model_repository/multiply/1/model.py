from typing import Any

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.input("INPUT0")
        y = call.output("OUTPUT0", x.shape, x.dtype)
        np.multiply(x.numpy(), 2, out=y.numpy())  # reads and writes the client's own memory

    def finalize(self) -> None:
        self.session.close()
