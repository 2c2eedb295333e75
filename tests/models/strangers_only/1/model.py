"""Opens regions of the user nobody alone."""

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        call.put("Y", call.input("X"))

    def finalize(self):
        self.session.close()
