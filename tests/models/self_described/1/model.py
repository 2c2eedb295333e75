"""Describes itself where no config.pbtxt does: X goes in, and comes out as Y. With batches if its name says so."""

from shm_backend_utils.model import Call, auto_complete
from tests.served import Served


class TritonPythonModel(Served):
    @staticmethod
    def auto_complete_config(config):
        described = config.as_dict()
        if "batches" in described["name"]:
            config.set_max_batch_size(8)
        if not described["input"]:
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [3]})
        return auto_complete(config)

    def infer(self, call: Call) -> None:
        call.put("Y", call.input("X"))
