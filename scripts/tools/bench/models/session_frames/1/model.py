from shm_backend_utils.model import ShmSession, StreamCall


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call: StreamCall):
        count, byte_size = call.input("FRAMES").numpy().tolist()
        for number in range(count):
            call.output("FRAME", (byte_size,), "uint8").numpy()[:] = number % 256
            yield

    def finalize(self):
        self.session.close()
