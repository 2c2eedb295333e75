"""Answers with each element of its input, and ends the stream without a response."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = request.inputs()[0].as_numpy()
            for place in range(len(array)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array[place : place + 1])]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
