import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session

    def execute(self, requests):
        return [self.multiply(request) for request in requests]

    def multiply(self, request):
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "INPUT0"), None)
        return self.backend.response([self.backend.output("OUTPUT0", np.multiply(x, 2))])
