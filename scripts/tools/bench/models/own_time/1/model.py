import time

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.own_ns = 0

    def execute(self, requests):
        begin = time.perf_counter_ns()
        responses = self.session.serve(requests, self.infer)
        self.own_ns = time.perf_counter_ns() - begin
        return responses

    def infer(self, call: Call) -> None:
        """Give every output the time that the request before took. The model itself does nothing worth measuring."""
        for name in call.inputs:
            call.output(name.replace("X", "Y"), (1,), "int64").numpy()[0] = self.own_ns

    def finalize(self):
        self.session.close()
