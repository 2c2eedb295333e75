"""Answers with as many responses as the parameter `count` says; response i is the input plus i."""

import itertools

import numpy as np

from shm_backend_utils.model import ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call):
        x = call.input("X").numpy()
        count = call.parameters.get("count")
        for i in itertools.count() if count is None else range(count):
            y = call.output("Y", x.shape, x.dtype)
            np.add(x, np.float32(i), out=y.numpy())
            yield

    def finalize(self):
        self.session.close()
