"""Hands X on to `halves` as it is, or, if the parameter `copies` says so, a copy of it."""

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        headers = {name: value for name, value in call.parameters.items() if name.lower().startswith("soak-")}
        headers["sleep_ms"] = call.parameters.get("sleep_ms", 0)
        x = call.input("X")
        if call.parameters.get("copies"):
            call.put("Y", call.forward("halves", {"X": x.numpy().copy()}, ["Y"], parameters=headers)["Y"])
        else:
            call.forward("halves", {"X": x}, {"Y": call.output("Y", x.shape, x.dtype)}, parameters=headers)

    def finalize(self):
        self.session.close()
