import time

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session
        self.x = np.zeros(0, np.float32)

    def execute(self, requests):
        return [self.relay(request) for request in requests]

    def relay(self, request):
        count, last = self.backend.input(pb_utils.get_input_tensor_by_name(request, "X"), None)
        if len(self.x) != int(count):
            self.x = np.zeros(int(count), np.float32)
        self.x[-1] = last
        begin = time.perf_counter_ns()
        tensor = self.backend.output("INPUT0", self.x)
        response = pb_utils.InferenceRequest(
            model_name="stock_identity", requested_output_names=["OUTPUT0"], inputs=[tensor]
        ).exec()
        if response.has_error():
            return pb_utils.InferenceResponse([], response.error())
        y = self.backend.input(response.output_tensors()[0], None)
        last = y[-1:].copy()
        took_ns = time.perf_counter_ns() - begin
        tensors = {"LAST": last, "TOOK_NS": np.array([took_ns], np.int64)}
        return pb_utils.InferenceResponse([self.backend.output(name, array) for name, array in tensors.items()])
