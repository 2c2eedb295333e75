"""Takes four rows at most: gives two words of each in capitals, and its number as a word of that length."""

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        if call.requested("LOUD"):
            words = call.input("WORDS").numpy()
            call.put("LOUD", np.array([word.upper() for word in words.flat], object).reshape(words.shape))
        if call.requested("SPELLED"):
            numbers = call.input("NUMBERS").numpy()
            call.put("SPELLED", np.array([b"x" * number for number in numbers.flat], object).reshape(numbers.shape))
