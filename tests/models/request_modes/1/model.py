"""Says that it has begun, waits until it may go on or nobody wants it to, and tells what the call knew."""

import json
import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession

PATIENCE_S = 20.0


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        begin = time.monotonic()
        call.output("BEGUN", (1,), "int64").numpy()[0] = 1
        go = call.input("GO").numpy()
        while not go[0] and not call.cancelled:
            assert time.monotonic() < begin + PATIENCE_S
            time.sleep(0.001)
        facts = {
            "request_id": call.request_id,
            "sequence": call.sequence,
            "left_s": None if call.deadline is None else call.deadline - begin,
            "cancelled": call.cancelled,
        }
        call.put("FACTS", np.frombuffer(json.dumps(facts).encode(), np.uint8))

    def finalize(self):
        self.session.close()
