from typing import Any

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        # The other model reads the photograph in the client's memory, and writes to memory of this model.
        normalized = call.forward("image_resize_normalize", {"IMAGE": call.input("IMAGE")})["NORMALIZED"]
        # The next one reads it there, and writes to the client's memory: nothing was copied on the way.
        mean = call.output("MEAN", (1, 3), np.float32)
        std = call.output("STD", (1, 3), np.float32)
        batch_of_one = normalized.numpy()[np.newaxis]
        call.forward("batch_statistics", {"IMAGE": batch_of_one}, {"MEAN": mean, "STD": std})

    def finalize(self) -> None:
        self.session.close()
