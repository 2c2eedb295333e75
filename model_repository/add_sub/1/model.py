"""OUTPUT0 is the sum of INPUT0 and INPUT1, OUTPUT1 their difference, computed where the client put them."""

from typing import Any

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        a, b = call.input("INPUT0"), call.input("INPUT1")
        total = call.output("OUTPUT0", a.shape, a.dtype)
        difference = call.output("OUTPUT1", a.shape, a.dtype)
        np.add(a.numpy(), b.numpy(), out=total.numpy())
        np.subtract(a.numpy(), b.numpy(), out=difference.numpy())

    def finalize(self) -> None:
        self.session.close()
