from shm_backend_utils.model import ShmSession, StreamCall

BYTES = 1_000_000


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call: StreamCall):
        for number in range(int(call.input("COUNT").numpy()[0])):
            call.output("FRAME", (BYTES,), "uint8").numpy()[:] = number % 256
            yield

    def finalize(self):
        self.session.close()
