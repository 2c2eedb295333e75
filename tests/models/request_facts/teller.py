"""Tells what it is told beside tensors, as JSON."""

import json

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def initialize(self, args):
        super().initialize(args)
        self.version = args["model_version"]

    def execute(self, requests):
        return [self.session.serve([request], lambda call: self.tell(call, request))[0] for request in requests]  # noqa: B023

    def tell(self, call: Call, request) -> None:
        facts = {
            "version": self.version,
            "request_id": request.request_id(),
            "parameters": call.parameters,
            "timeout": request.timeout(),
            "path": call.path,
        }
        call.put("FACTS", np.frombuffer(json.dumps(facts).encode(), np.uint8))
