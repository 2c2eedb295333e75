"""Does wrong what the parameter `deed` says."""

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
        if deed == "write an input":
            x[:] = 0
        if deed != "write nothing":
            call.put("Y", x)
