"""Maps little at once."""

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        call.put("Y", call.input("X"))
