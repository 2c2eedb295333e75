"""Tells what a call says beside tensors, as JSON, from two instances.

The parameter `note` makes it wait until the client wants the answer no more, which it notes in that file.
"""

import json
import time
from pathlib import Path

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served

PATIENCE_S = 10
APART_S = 0.3  # before 24.12, Triton may crash if an answer comes just as its call is cancelled (its issue 7368)


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        was_cancelled = call.cancelled
        if "note" in call.parameters:
            note = Path(call.parameters["note"])
            note.write_text("waiting")
            deadline = time.monotonic() + PATIENCE_S
            while not call.cancelled and time.monotonic() < deadline:
                time.sleep(0.001)
            note.write_text("cancelled" if call.cancelled else "not cancelled")
            time.sleep(APART_S)
        facts = {
            "request_id": call.request_id,
            "sequence": call.sequence,
            "left_s": None if call.deadline is None else call.deadline - time.monotonic(),
            "cancelled": was_cancelled,
        }
        call.put("FACTS", np.frombuffer(json.dumps(facts).encode(), np.uint8))
