"""Has other models do the work, in the way that the parameter `way` says."""

import time

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        getattr(self, f"do_{call.parameters['way']}")(call, call.parameters.get("model", "identity"))

    def finalize(self):
        self.session.close()

    def do_forward(self, call, model):
        """What comes back, wherever it is, is put."""
        t = time.perf_counter()
        y = call.forward(model, {"INPUT0": call.input("X")})["OUTPUT0"]
        print("FWD", time.perf_counter() - t, y.path, flush=True)
        call.put("Y", y)

    def do_forward_into(self, call, model):
        """The other model writes to the client's own memory."""
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        assert call.forward(model, {"INPUT0": x}, {"OUTPUT0": y})["OUTPUT0"] is y

    def do_forward_twice(self, call, model):
        y = call.forward(model, {"INPUT0": call.input("X").numpy() + 1})["OUTPUT0"]
        z = call.forward(model, {"INPUT0": y})["OUTPUT0"]
        call.put("Y", z)
