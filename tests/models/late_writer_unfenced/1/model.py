"""The late writer without the leases that fence it in: to show that the test of them can fail."""

import time

import numpy as np

from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.model import Call
from tests.served import Served

SlotLease.take = lambda self: True
SlotLease.give_back = lambda self: None


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        value, delay_us = call.input("VALUE_AND_DELAY_US").numpy().tolist()  # read once: the client may change it
        values = call.output("VALUES", (512,), np.int64).numpy()
        values[:256] = value
        time.sleep(delay_us * 1e-6)
        values[256:] = value
