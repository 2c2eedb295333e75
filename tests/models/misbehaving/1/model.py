"""Does wrong what the parameter `deed` says."""

import asyncio

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served

BEYOND_EXCEPTION = {
    kind.__name__: kind for kind in (asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit)
}


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        deed = call.parameters["deed"]
        x = call.input("X").numpy()
        if deed == "raise":
            raise RuntimeError("the model gave up")
        if deed == "raise after writing":
            call.put("Y", x)
            raise RuntimeError("the model gave up late")
        if deed in BEYOND_EXCEPTION:
            call.put("Y", x)
            raise BEYOND_EXCEPTION[deed]("the model gave up")
        if deed == "forget an output":
            call.output("Y", x.shape, x.dtype)
            return
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
