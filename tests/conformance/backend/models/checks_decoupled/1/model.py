"""Runs the check that a request names, which ends the stream; answers the next request for it with what went wrong."""

import contextlib
import json
import traceback

import numpy as np
import triton_python_backend_utils as pb_utils
from backend_checks import CHECKS


class TritonPythonModel:
    def initialize(self, args):
        self.reports = {}

    def execute(self, requests):
        for request in requests:
            name = json.loads(request.parameters())["check"]
            if name in self.reports:
                report = pb_utils.Tensor("REPORT", np.array([self.reports.pop(name)], object))
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                request.get_response_sender().send(pb_utils.InferenceResponse([report]), final)
            else:
                self.reports[name] = self.run(name, request)

    def run(self, name, request):
        try:
            CHECKS[name](pb_utils, request)
        except BaseException:
            self.end(request)
            return traceback.format_exc()
        return ""

    def end(self, request):
        with contextlib.suppress(pb_utils.TritonModelException):  # the check may have ended it
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
