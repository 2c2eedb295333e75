"""Combines every word with a number that is made of the request's parameters; the second half after `sleep_ms`."""

import time
import zlib

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        parameters = sorted(
            (name.lower(), value) for name, value in call.parameters.items() if name.lower().startswith("soak-")
        )
        number = np.uint32(zlib.crc32(repr(parameters).encode()))
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        middle = x.shape[0] // 2
        np.bitwise_xor(x.numpy()[:middle], number, out=y.numpy()[:middle])
        time.sleep(call.parameters.get("sleep_ms", 0) / 1000)
        np.bitwise_xor(x.numpy()[middle:], number, out=y.numpy()[middle:])

    def finalize(self):
        self.session.close()
