"""Gives its input back in three ways: filled in place, copied, and passed through. Fails as `fault` says."""

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        x = call.input("X")
        fault = call.parameters.get("fault")
        if fault == "an error of its own":
            raise ValueError(fault)
        filled = call.output("FILLED", x.shape, "int8" if fault == "an output of another type" else x.dtype)
        filled.numpy()[:] = x.numpy()
        call.put("COPIED", x.numpy().copy())
        call.put("PASSED", x)
