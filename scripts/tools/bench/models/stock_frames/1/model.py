import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model.triton import TritonBackend


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()  # pb_utils' tensors to and from arrays, whatever NumPy there is; no session

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.get_input_tensor_by_name(request, "FRAMES")
            count, byte_size = self.backend.input(tensor, None).tolist()
            for number in range(count):
                frame = np.full(byte_size, number % 256, np.uint8)
                sender.send(pb_utils.InferenceResponse([self.backend.output("FRAME", frame)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
