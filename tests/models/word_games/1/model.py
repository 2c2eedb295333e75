"""Gives strings in the way that the parameter `game` names."""

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        game = call.parameters["game"]
        if game == "all but the first":
            call.put("Y", call.input("WORDS").strings()[1:])
        elif game == "the strings themselves":
            call.put("Y", call.input("WORDS").strings())
        elif game == "the array":
            call.put("Y", call.input("WORDS").numpy())
        else:
            call.put("Y", ["ü", "", "bc"])
