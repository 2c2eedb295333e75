"""Gives its input back in three ways: filled in place, copied, and passed through."""

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        x = call.input("X")
        call.output("FILLED", x.shape, x.dtype).numpy()[:] = x.numpy()
        call.put("COPIED", x.numpy().copy())
        call.put("PASSED", x)
