import numpy as np

from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.backend = TritonBackend()

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        image = call.input("IMAGE").numpy()
        normalized = self.ask("image_resize_normalize", image, ["NORMALIZED"])["NORMALIZED"]
        statistics = self.ask("batch_statistics", normalized[np.newaxis], ["MEAN", "STD"])
        call.put("MEAN", statistics["MEAN"])
        call.put("STD", statistics["STD"])

    def ask(self, model, image, outputs):
        tensor = self.backend.output("IMAGE", image)
        response = self.backend.execute(self.backend.request(model, "", [tensor], outputs, {}))
        assert not response.has_error(), response.error().message()
        return {tensor.name(): self.backend.input(tensor, None) for tensor in response.output_tensors()}

    def finalize(self):
        self.session.close()
