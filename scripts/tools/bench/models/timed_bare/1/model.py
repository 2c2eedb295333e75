import time

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()  # only to tell the times
        self.times_ns = []

    def execute(self, requests):
        begin = time.perf_counter_ns()
        responses = [self.answer(request) for request in requests]
        self.times_ns.append(time.perf_counter_ns() - begin)
        if requests[0].inputs():
            tensor = self.backend.output("TIMES_NS", np.array(self.times_ns[:-1], np.int64))  # less the question itself
            responses = [pb_utils.InferenceResponse([tensor])]
        return responses

    def answer(self, request):
        request.parameters()
        request.requested_output_names()
        return pb_utils.InferenceResponse([])
