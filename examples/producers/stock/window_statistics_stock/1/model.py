from typing import Any

import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        x = self.backend.input(pb_utils.get_input_tensor_by_name(request, "WINDOW"), None)
        lowest = self.backend.output("MIN", x.min(axis=1))
        return self.backend.response([lowest, self.backend.output("MAX", x.max(axis=1))])
