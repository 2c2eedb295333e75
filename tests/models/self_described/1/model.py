"""Describes itself where no config.pbtxt does: X goes in, and comes out as Y. With batches if its name says so."""

from shm_backend_utils.model import Call, ShmSession, auto_complete


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        described = config.as_dict()
        if "batches" in described["name"]:
            config.set_max_batch_size(8)
        if not described["input"]:
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [3]})
        return auto_complete(config)

    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        call.put("Y", call.input("X"))

    def finalize(self):
        self.session.close()
