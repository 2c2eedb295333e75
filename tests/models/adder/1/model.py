"""SUM = A + B, where it is asked for in band; and in any case where the request has room for it."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        a, b = call.input("A").numpy(), call.input("B").numpy()
        np.add(a, b, out=call.output("SUM", a.shape, a.dtype).numpy())
