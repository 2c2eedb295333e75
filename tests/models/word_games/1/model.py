"""Gives strings in the way that the parameter `game` names."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served

ANSWERS = {
    "list": ["ü", "", "bc"],
    "list of bytes": [b"\xff", b"ends with nothing\0", b""],
    "list of both": ["ü", b"\xff", b"\0"],
    "array of text": np.array(["ü", "bc"]),
    "array of bytes": np.array([b"\xff", b"bc"]),
    "array of objects": np.array(["ü", b"\xff\0"], object),
    "array in another order": np.array(["a", "b", "c", "d"], object)[::-2],
    "nothing": [],
    "array of nothing": np.empty(0, object),
    "a number": [1],
    "a number among objects": np.array([b"a", 1, "b"], object),
    "numbers": np.array([1.5, 2.5]),
    "a list among objects": np.array([[b"a"], None], object),
    "text that has no UTF-8": np.array(["\ud800"], object),
    "two dimensions": [["a", "b"]],
}


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        game = call.parameters["game"]
        if game == "all but the first":
            call.put("Y", call.input("WORDS").strings()[1:])
        elif game == "the strings themselves":
            call.put("Y", call.input("WORDS").strings())
        elif game == "the array":
            call.put("Y", call.input("WORDS").numpy())
        elif game == "memory":
            call.output("Y", (2,), "S20")
        else:
            call.put("Y", ANSWERS[game])
