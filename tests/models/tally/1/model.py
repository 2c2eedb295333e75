"""Passes its input on, and counts the requests that came and those that it began with. Fails where `fail` says, with
the words in `message`; what has `ask` is not counted.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.errors import ShmError
from tests.served import Served


class TritonPythonModel(Served):
    def initialize(self, args):
        super().initialize(args)
        self.counts = np.zeros(2, np.int64)

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        parameters = json.loads(request.parameters() or "{}")
        counted = not parameters.get("ask")
        failure = pb_utils.InferenceResponse([], pb_utils.TritonError(parameters.get("message", "the model gave up")))
        fail = parameters.get("fail")
        self.counts[0] += counted
        if fail == "before it begins":
            return failure
        call = self.session.open(request)
        try:
            with call:
                self.counts[1] += counted
                if fail == "half way":
                    raise ShmError(parameters.get("message", "the model gave up"))
                call.put("Y", call.input("X"))
                call.put("COUNTS", self.counts)
        except ShmError:
            return call.response
        return failure if fail == "at the end" else call.response
