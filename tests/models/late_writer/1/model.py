"""Fills its output with a value: half of it at once, the rest after a delay. Several instances, so that a late one does
not keep the next request from being executed.
"""

import time

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        value, delay_us = call.input("VALUE_AND_DELAY_US").numpy().tolist()  # read once
        values = call.output("VALUES", (512,), np.int64).numpy()
        values[:256] = value
        time.sleep(delay_us * 1e-6)
        values[256:] = value
