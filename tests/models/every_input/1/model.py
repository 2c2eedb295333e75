"""Adds its inputs, all of which it needs, whatever its configuration says."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        call.put("Y", np.add(call.input("W").numpy(), call.input("X").numpy()))
