"""Counts as far as its input says, in numbers and in words: nobody knows the sizes before.

Half of the numbers at once, the rest after a delay. Several instances, so that a late one does not keep the next
request from being executed.
"""

import time

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        count, delay_us = call.input("COUNT_AND_DELAY_US").numpy().tolist()  # read once
        numbers = call.output("NUMBERS", (count,), np.float32).numpy()
        half = count // 2
        numbers[:half] = np.arange(half)
        time.sleep(delay_us * 1e-6)
        numbers[half:] = np.arange(half, count)
        if call.requested("WORDS"):
            call.put("WORDS", np.array([str(number) for number in range(count)], object))
