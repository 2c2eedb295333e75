"""Answers with as many responses as the parameter `count` says; without it, until the client has had enough.

Response i is the input plus i. The parameter `fails_at` has an error in the place of one of them, `stalls_at` nothing.
"""

import itertools
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()

    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        parameters = json.loads(request.parameters() or "{}")
        sender = request.get_response_sender()
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "X"), None)
        count = parameters.get("count")
        for i in itertools.count() if count is None else range(count):
            if sender.is_cancelled():
                break
            if i == parameters.get("stalls_at"):
                while not sender.is_cancelled():
                    time.sleep(0.001)
                break
            if i == parameters.get("fails_at"):
                sender.send(self.backend.error_response(RuntimeError("the model gave up half way")))
                break
            sender.send(self.backend.response([self.backend.output("Y", x + np.float32(i))]))
            if count is None:
                time.sleep(0.001)  # leaves the server time to hear that the client has gone
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
