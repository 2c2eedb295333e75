"""Runs the check that a request names, and answers with what went wrong: an empty text, if nothing did."""

import json
import traceback

import numpy as np
import triton_python_backend_utils as pb_utils
from backend_checks import CHECKS


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        report = ""
        try:
            CHECKS[json.loads(request.parameters())["check"]](pb_utils, request)
        except BaseException:
            report = traceback.format_exc()
        return pb_utils.InferenceResponse([pb_utils.Tensor("REPORT", np.array([report], object))])
