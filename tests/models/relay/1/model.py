"""Passes X on to the models that the parameter `to` names, one after another, with slashes between them."""

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        model, _, rest = call.parameters["to"].partition("/")
        x, y = ("INPUT0", "OUTPUT0") if model == "identity" else ("X", "Y")
        parameters = {"way": "forward", "model": rest, "to": rest}
        call.put("Y", call.forward(model, {x: call.input("X")}, [y], parameters=parameters)[y])
