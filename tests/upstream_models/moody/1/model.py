"""Says of itself that it is ready, or not, as the last request has told it to."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.mood = "ready"

    def is_ready(self):
        if self.mood == "broken":
            raise ValueError("no idea")
        return self.later() if self.mood == "later" else {"ready": True, "wordy": "yes"}.get(self.mood, False)

    async def later(self):
        return True

    def execute(self, requests):
        self.mood = json.loads(requests[-1].parameters())["mood"]
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for _ in requests]
