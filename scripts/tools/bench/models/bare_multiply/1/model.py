import numpy as np
import triton_python_backend_utils as pb_utils

SHAPE = (16, 3, 224, 224)


class TritonPythonModel:
    def initialize(self, args):
        self.x, self.y = np.ones(SHAPE, np.float32), np.ones(SHAPE, np.float32)

    def execute(self, requests):
        return [self.multiply() for _ in requests]

    def multiply(self):
        np.multiply(self.x, 2, out=self.y)
        return pb_utils.InferenceResponse([])
