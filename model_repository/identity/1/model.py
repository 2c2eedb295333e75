from typing import Any

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        call.put("OUTPUT0", call.input("INPUT0"))  # an input that is passed on is not copied

    def finalize(self) -> None:
        self.session.close()
