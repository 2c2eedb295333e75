from typing import Any

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        texts = call.input("TEXT").strings()  # decoded one by one, as they are asked for; each is bytes
        call.put("UPPER", [text.decode().upper() for text in texts])

    def finalize(self) -> None:
        self.session.close()
