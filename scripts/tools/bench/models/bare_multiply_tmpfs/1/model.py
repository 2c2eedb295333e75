import math
import mmap
import os

import numpy as np
import triton_python_backend_utils as pb_utils

SHAPE = (16, 3, 224, 224)


def ones_in_tmpfs():
    byte_size = 4 * math.prod(SHAPE)
    file = os.memfd_create("bare_multiply")
    os.ftruncate(file, byte_size)
    array = np.frombuffer(mmap.mmap(file, byte_size), np.float32).reshape(SHAPE)
    os.close(file)
    array[:] = 1
    return array


class TritonPythonModel:
    def initialize(self, args):
        self.x, self.y = ones_in_tmpfs(), ones_in_tmpfs()

    def execute(self, requests):
        return [self.multiply() for _ in requests]

    def multiply(self):
        np.multiply(self.x, 2, out=self.y)
        return pb_utils.InferenceResponse([])
