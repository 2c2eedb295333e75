"""LOUD: the words of a whole batch in capitals. SIZE tells each row how many rows the batch has."""

import numpy as np

from tests.served import Served


class TritonPythonModel(Served):
    def execute(self, requests):
        return self.session.serve_batch(requests, self.infer)

    def infer(self, batch):
        words = batch.input("WORDS")
        batch.put("LOUD", np.array([word.upper() for word in words.strings()], object).reshape(words.shape))
        batch.output("SIZE", (1,), np.int32).numpy()[:] = batch.size
