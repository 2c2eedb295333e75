"""Does wrong what the parameter `deed` says."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        deed = call.parameters["deed"]
        x = call.input("X").numpy()
        if deed == "raise":
            raise RuntimeError("the model gave up")
        if deed == "raise after writing":
            call.put("Y", x)
            raise RuntimeError("the model gave up late")
        if deed == "wrong dtype":
            call.output("Y", x.shape, np.float64)
        if deed == "wrong shape":
            call.output("Y", (*x.shape, 1), x.dtype)
        if deed == "unknown output":
            call.output("Z", x.shape, x.dtype)
        if deed == "write an input":
            x[:] = 0
        if deed == "unknown input":
            call.input("W")
        if deed != "write nothing":
            call.put("Y", x)
