"""Adds one, half by half, and stops at the stage that the test names, until the test lets it go or kills it."""

import json
import os
import select
from pathlib import Path

import numpy as np

from shm_backend_utils.errors import ShmError
from tests.served import Served

PATIENCE_S = 30


class TritonPythonModel(Served):
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        parameters = json.loads(request.parameters() or "{}")
        stop(parameters, "not begun")
        call = self.session.open(request)
        try:
            with call:
                x = call.input("X").numpy()
                y = call.output("Y", x.shape, x.dtype).numpy()
                middle = len(x) // 2
                np.add(x[:middle], 1, out=y[:middle])
                stop(parameters, "half written")
                np.add(x[middle:], 1, out=y[middle:])
            stop(parameters, "stamped")
        except ShmError:
            pass  # the response says it
        return call.response


def stop(parameters, stage):
    if parameters.get("stage") != stage or not Path(parameters["arrived"]).exists():
        return
    go = os.open(parameters["go"], os.O_RDONLY | os.O_NONBLOCK)
    Path(parameters["arrived"]).write_bytes(b"here")  # opens when the test does
    select.select([go], [], [], PATIENCE_S)
    os.close(go)
