"""LOUD: the words of a whole batch in capitals. SIZE tells each row how many rows the batch has."""

import numpy as np

from shm_backend_utils.model import ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve_batch(requests, self.infer)

    def infer(self, batch):
        words = batch.input("WORDS")
        batch.put("LOUD", np.array([word.upper() for word in words.strings()], object).reshape(words.shape))
        batch.output("SIZE", (1,), np.int32).numpy()[:] = batch.size

    def finalize(self):
        self.session.close()
